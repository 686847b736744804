"""Metrics that torchmetrics does not have."""
