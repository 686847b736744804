"""Lockstep R/A decoding: reasoning and answer regions that are decoded together."""
