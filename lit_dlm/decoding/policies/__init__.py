"""decoding/policies."""
