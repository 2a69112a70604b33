"""Which model answers a request: the only one, or one of several that are loaded as they are asked for."""
