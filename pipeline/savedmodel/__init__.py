"""How an export lies on disk."""
