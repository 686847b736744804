"""Scores of acceptance decisions on stored states, and what a policy would do there."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

_BETA = 0.5
"""Weight of recall (in :class:`ReplayScore` of saved steps) against precision (release)."""


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

    def __init__(self, *, threshold: float = 0.99) -> None:
        """Sets the rule.

        Args:
            threshold: acceptance probability from which a proposal counts as accepted.
        """
        super().__init__()
        self.threshold = threshold
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
            ``f_beta = (1 + b^2) P R / (b^2 P + R)`` (0 when both are 0), ``f1``, ``precision``,
            ``recall``, ``accuracy``, ``specificity``, ``fpr`` (false positive rate), ``npv``
            (negative predictive value), ``accept_rate`` and ``positive_rate``, each 0 where its
            denominator is empty, and the counts ``tp``, ``fp``, ``fn`` and ``tn``.
        """
        tp, fp = self.true_positive.double(), self.false_positive.double()
        fn, tn = self.false_negative.double(), self.true_negative.double()
        total = tp + fp + fn + tn
        precision = tp / (tp + fp).clamp_min(1)
        recall = tp / (tp + fn).clamp_min(1)
        scores = {
            "f_beta": f_beta(precision, recall, _BETA),
            "f1": f_beta(precision, recall, 1.0),
            "precision": precision,
            "recall": recall,
            "accuracy": (tp + tn) / total.clamp_min(1),
            "specificity": tn / (tn + fp).clamp_min(1),
            "fpr": fp / (tn + fp).clamp_min(1),
            "npv": tn / (tn + fn).clamp_min(1),
            "accept_rate": (tp + fp) / total.clamp_min(1),
            "positive_rate": (tp + fn) / total.clamp_min(1),
            "tp": tp,
            "fp": fp,
            "fn": fn,
            "tn": tn,
        }
        return {name: value.float() for name, value in scores.items()}


def f_beta(precision: Tensor, recall: Tensor, beta: float) -> Tensor:
    """``(1 + b^2) P R / (b^2 P + R)``, elementwise in the shape of both, 0 where both are 0."""
    square = beta**2
    denominator = square * precision + recall
    value = (1 + square) * precision * recall / denominator.clamp_min(1e-30)
    return torch.where(denominator > 0, value, torch.zeros_like(value))


class ReplayScore(Metric):
    """False commits and implied steps, from the commits that a policy makes on stored states.

    A state in which a policy commits ``c`` tokens, ``f`` of them wrong, costs ``1 / c`` steps and
    ``f / c`` wrong tokens per token written. Both are averaged over bins of the masked share of the
    response, each bin alike, because a decode passes through all of them whatever the stored
    states are; the number of tokens then turns them into counts per trace. It is an estimate: the
    states are those of the stored traces and not those that the policy's own commits lead to.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    states: Tensor
    steps_per_token: Tensor
    false_per_token: Tensor
    num_tokens: Tensor

    def __init__(self, *, num_bins: int = 16) -> None:
        """Sets the rule.

        Args:
            num_bins: bins of the masked share.
        """
        super().__init__()
        self.num_bins = num_bins
        for name in ("states", "steps_per_token", "false_per_token"):
            zeros = torch.zeros(num_bins, dtype=torch.float64)
            self.add_state(name, zeros, dist_reduce_fx="sum")
        zero = torch.tensor(0.0, dtype=torch.float64)
        self.add_state("num_tokens", zero, dist_reduce_fx="sum")

    def update(self, commit: Tensor, label: Tensor, masked: Tensor, length: Tensor) -> None:
        """Adds states.

        Args:
            commit: ``(B, R)`` bool: what the policy commits; rows without a commit do not count.
            label: ``(B, R)`` bool: the proposal is the trace's final token.
            masked: ``(B, R)`` bool: masked positions.
            length: ``(B,)`` response positions of each row.
        """
        num_commits = commit.sum(1)
        chosen = num_commits > 0
        num_commits = num_commits[chosen].double()
        num_false = (commit & ~label).sum(1)[chosen].double()
        length = length[chosen]
        share = masked.sum(1)[chosen] / length.clamp_min(1)
        # A share of 1 / num_bins is the upper end of the first bin.
        bins = ((share * self.num_bins).ceil().long() - 1).clamp(0, self.num_bins - 1)
        self.states.index_add_(0, bins, torch.ones_like(num_commits))
        self.steps_per_token.index_add_(0, bins, 1.0 / num_commits)
        self.false_per_token.index_add_(0, bins, num_false / num_commits)
        self.num_tokens += length.double().sum()

    def compute(self) -> dict[str, Tensor]:
        """Scalars over everything seen.

        Returns:
            ``steps`` and ``false_commits`` per trace, ``speedup`` over one token per step,
            ``false_rate`` (wrong share of the commits), and ``score``: F-beta of ``1 - false_rate``
            and of the saved share of the steps. All 0 without data.
        """
        seen = self.states > 0
        count = self.states.clamp_min(1)
        num_seen = seen.sum().clamp_min(1)
        steps_ratio = (self.steps_per_token / count)[seen].sum() / num_seen
        false_rate = (self.false_per_token / count)[seen].sum() / num_seen
        length = self.num_tokens / self.states.sum().clamp_min(1)
        saved = torch.where(seen.any(), 1.0 - steps_ratio, 0.0)
        right = torch.where(seen.any(), 1.0 - false_rate, 0.0)
        return {
            "score": f_beta(right, saved, _BETA).float(),
            "steps": (length * steps_ratio).float(),
            "speedup": torch.where(seen.any(), 1.0 / steps_ratio.clamp_min(1e-12), 0.0).float(),
            "false_commits": (length * false_rate).float(),
            "false_rate": false_rate.float(),
        }


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
        super().__init__()
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
