"""TF Serving: files for the real server, a linter, a local server that speaks its protocol, and a client of either."""
