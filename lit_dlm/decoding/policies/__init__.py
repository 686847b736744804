"""Commit policies: which of the proposed tokens become final."""
