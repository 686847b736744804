"""How well accepted proposals agree with the trace's final tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from lit_dlm.metrics.replay import f_beta


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
            "f_beta": f_beta(precision, recall, self.beta),
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


class ThresholdScan(Metric):
    """Best fixed threshold of a network without a dynamic one.

    The release tries 19 thresholds, 0.05 to 0.95, on a random tenth of the positions, keeps the one
    with the best F1 and reports it on all positions.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    sample_counts: Tensor
    counts: Tensor

    def __init__(self, *, sample_share: float = 0.1) -> None:
        """Sets the share of positions that choose the threshold."""
        super().__init__()
        if not 0.0 < sample_share <= 1.0:
            raise ValueError(f"sample_share: expected a number in (0, 1], got {sample_share}")
        self.sample_share = sample_share
        self.thresholds = torch.arange(1, 20, dtype=torch.float64) / 20
        for name in ("sample_counts", "counts"):
            zeros = torch.zeros(19, 3, dtype=torch.float64)
            self.add_state(name, zeros, dist_reduce_fx="sum")

    def update(self, logits: Tensor, label: Tensor, generator: torch.Generator) -> None:
        """Counts decisions at every threshold.

        Args:
            logits: ``(N,)`` floating point.
            label: ``(N,)`` bool.
            generator: on the CPU; draws the positions that choose.
        """
        limits = torch.logit(self.thresholds).to(logits)
        accept = logits[:, None] >= limits  # (N, 19)
        positive = label[:, None].expand_as(accept)
        # True positives, accepted, positives: all that F1 needs.
        facts = torch.stack([accept & positive, accept, positive], dim=-1).double()
        draws = torch.rand(len(logits), dtype=torch.float32, generator=generator)
        sampled = draws < self.sample_share
        self.counts += facts.sum(0)
        self.sample_counts += facts[sampled.to(logits.device)].sum(0)

    def compute(self) -> dict[str, Tensor]:
        """The ``threshold`` that was best on the sample, the lowest of equals, and its ``f1``."""
        f1 = [
            2 * counts[:, 0] / (counts[:, 1] + counts[:, 2]).clamp_min(1)
            for counts in (self.sample_counts, self.counts)
        ]
        best = int(f1[0].argmax())
        return {"threshold": self.thresholds[best].float(), "f1": f1[1][best].float()}
