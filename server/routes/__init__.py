"""One module per family of endpoints."""
