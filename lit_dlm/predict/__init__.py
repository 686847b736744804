"""Decoding as a Lightning predict loop."""
