"""Configurations of runs."""
