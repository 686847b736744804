"""Losses, and the corruptions that make the states they are computed on."""
