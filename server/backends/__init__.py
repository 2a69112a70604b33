"""How a request becomes a stream of outputs."""
