"""Does an acceptance probability mean what it says?"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric


class CalibrationCurve(Metric):
    """Reliability curve and expected calibration error (ECE, arXiv 1706.04599, equation 3).

    Probabilities are cut into bins of equal width; the last one holds probability 1.
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    count: Tensor
    prob_sum: Tensor
    label_sum: Tensor

    def __init__(self, *, num_bins: int = 20) -> None:
        """Sets the number of bins."""
        super().__init__()
        if num_bins < 1:
            raise ValueError(f"num_bins: expected at least 1, got {num_bins}")
        self.num_bins = num_bins
        for name in ("count", "prob_sum", "label_sum"):
            zeros = torch.zeros(num_bins, dtype=torch.float64)
            self.add_state(name, zeros, dist_reduce_fx="sum")

    def update(self, prob: Tensor, label: Tensor) -> None:
        """Adds positions.

        Args:
            prob: ``(N,)`` floating point in ``[0, 1]``.
            label: ``(N,)`` bool.
        """
        bins = (prob * self.num_bins).long().clamp(0, self.num_bins - 1)
        for total, values in (
            (self.count, torch.ones_like(prob)),
            (self.prob_sum, prob),
            (self.label_sum, label),
        ):
            total.index_add_(0, bins, values.to(total.dtype))

    def compute(self) -> dict[str, Tensor]:
        """The curve.

        Returns:
            ``ece``: scalar, 0 without data. ``prob`` and ``accuracy``: ``(num_bins,)`` means of
            each bin, NaN where it is empty. ``count``: ``(num_bins,)``.
        """
        gap = (self.prob_sum - self.label_sum).abs().sum()
        return {
            "ece": (gap / self.count.sum().clamp_min(1)).float(),
            "prob": (self.prob_sum / self.count).float(),
            "accuracy": (self.label_sum / self.count).float(),
            "count": self.count.long(),
        }
