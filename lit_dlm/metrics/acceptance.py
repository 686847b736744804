"""How well accepted proposals agree with the trace's final tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric


class RolloutProxy(Metric):
    """Precision, recall and F-beta of acceptances at a fixed decision threshold, micro-averaged.

    The checkpoint metric of the TraceLock release (``rollout proxy F0.5``, arXiv 2605.24697): a
    proposal is accepted iff ``sigmoid(decision logit) >= threshold``. Beta below 1 weighs
    precision, because a wrong acceptance cannot be undone. No window, cap or policy-made state
    enters it, so it is a proxy of a decode and not a result of one.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    true_positive: Tensor
    false_positive: Tensor
    false_negative: Tensor
    true_negative: Tensor

    def __init__(self, *, threshold: float = 0.99, beta: float = 0.5) -> None:
        """Sets the rule.

        Args:
            threshold: acceptance probability from which a proposal counts as accepted.
            beta: weight of recall against precision.
        """
        super().__init__()
        if not 0.0 <= threshold <= 1.0:
            raise ValueError(f"threshold: expected a probability in 0..1, got {threshold}")
        if beta <= 0.0:
            raise ValueError(f"beta: expected a positive number, got {beta}")
        self.threshold = threshold
        self.beta = beta
        self._limit = torch.logit(torch.tensor(threshold, dtype=torch.float64)).item()
        for name in ("true_positive", "false_positive", "false_negative", "true_negative"):
            self.add_state(name, torch.tensor(0), dist_reduce_fx="sum")

    def update(self, decision_logits: Tensor, label: Tensor) -> None:
        """Counts decisions.

        Args:
            decision_logits: ``(N,)`` floating point, positions in the evaluated set only.
            label: ``(N,)`` bool: the proposal is the trace's final token.
        """
        accept = decision_logits >= self._limit
        self.true_positive += (accept & label).sum()
        self.false_positive += (accept & ~label).sum()
        self.false_negative += (~accept & label).sum()
        self.true_negative += (~accept & ~label).sum()

    def compute(self) -> dict[str, Tensor]:
        """Scalars over everything seen.

        Returns:
            ``f_beta = (1 + b^2) P R / (b^2 P + R)`` (0 when both are 0), ``precision``,
            ``recall`` and ``accept_rate``, each 0 where its denominator is empty.
        """
        tp, fp = self.true_positive.double(), self.false_positive.double()
        fn, tn = self.false_negative.double(), self.true_negative.double()
        precision = tp / (tp + fp).clamp_min(1)
        recall = tp / (tp + fn).clamp_min(1)
        square = self.beta**2
        denominator = square * precision + recall
        f_beta = torch.where(
            denominator > 0, (1 + square) * precision * recall / denominator.clamp_min(1e-30), 0.0
        )
        return {
            "f_beta": f_beta.float(),
            "precision": precision.float(),
            "recall": recall.float(),
            "accept_rate": ((tp + fp) / (tp + fp + fn + tn).clamp_min(1)).float(),
        }
