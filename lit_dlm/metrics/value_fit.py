"""Scores from sums, which do not depend on how a data set was cut into batches."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torchmetrics import Metric


class Quotient(Metric):
    """One sum over another, 0 where the latter is 0."""

    full_state_update = False

    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sums", torch.zeros(2, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, numerator: Tensor, denominator: float) -> None:
        """Adds to both; the denominator is 0 or more."""
        added = numerator.new_tensor([0.0, denominator], dtype=torch.float64)
        added[0] = numerator.detach()
        self.sums = self.sums + added  # not in place: stays float64 in a model of bfloat16

    def compute(self) -> Tensor:
        numerator, denominator = self.sums.unbind()
        return torch.where(denominator > 0, numerator / denominator, 0.0).float()


class ValueFit(Metric):
    """How well values fit returns, over all tokens alike.

    Args:
        score: ``error``, the root of the mean squared error, or ``explained``, the share of the
            returns' variance that the values explain: 0 where these do not vary.
    """

    full_state_update = False

    sums: Tensor

    def __init__(self, score: Literal["error", "explained"]) -> None:
        super().__init__()
        self.score = score
        self.add_state("sums", torch.zeros(4, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Tensor, returns: Tensor, counted: Tensor) -> None:
        """Adds ``(N,)`` tokens, of which those that are ``counted`` count."""
        target = torch.where(counted, returns, 0.0).double()
        error = torch.where(counted, values.detach() - returns, 0.0).double()
        terms = (counted.double(), target, target**2, error**2)
        self.sums = self.sums + torch.stack([term.sum() for term in terms])

    def compute(self) -> Tensor:
        count, total, squares, errors = self.sums.unbind()
        count = count.clamp_min(1)
        if self.score == "error":
            return (errors / count).sqrt().float()
        variance = squares / count - (total / count) ** 2
        explained = 1.0 - errors / count / variance
        return torch.where(variance > 1e-6, explained, 0.0).float()
