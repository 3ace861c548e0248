"""TF Serving: files for the real server, a linter, a local server that speaks its protocol, and a client of either."""


def remote(url, contract, **how):
    """An export on a server as the functions of a picture; see `pipeline.serving.client.remote`."""
    # Here, so that the package itself loads nothing.
    from pipeline.serving import client

    return client.remote(url, contract, **how)
