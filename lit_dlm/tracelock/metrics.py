"""Validation scores of an acceptance policy: its decisions on stored states, and their replay.

The release's rollout proxy ignores window, cap, gate and fallback. The *replay* applies them to the
stored states of validation traces, which costs one more forward of the network.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision

from lit_dlm.backbones.base import Backbone
from lit_dlm.decoding import DecodeSettings, Window
from lit_dlm.decoding.state import Canvas, initial_state
from lit_dlm.decoding.step import end_of_text_gate
from lit_dlm.decoding.windows import default_window
from lit_dlm.system.options import one_of
from lit_dlm.tensors.sampling import top_quota
from lit_dlm.tracelock.network import accepted, as_logit
from lit_dlm.tracelock.policy import left_of_window_end
from lit_dlm.tracelock.scorer import CommitSettings
from lit_dlm.tracelock.states import StateBatch

_BETA = 0.5
"""Weight of recall (in :class:`ReplayScore` of saved steps) against precision (release)."""


class AcceptanceScores(nn.Module):
    """Metrics of one validation, summed over all processes.

    The training module updates ``proxy`` and ``replay`` itself, on the positions they score.
    """

    def __init__(self, *, with_replay: bool) -> None:
        super().__init__()
        self.proxy = RolloutProxy(threshold=0.99)
        self.even = RolloutProxy(threshold=0.5)
        self.auroc = BinaryAUROC()
        self.average_precision = BinaryAveragePrecision()
        self.calibration = CalibrationCurve()
        self.tau_mean, self.tau_square = MeanMetric(), MeanMetric()
        self.tau_prob = MeanMetric()
        self.replay = ReplayScore() if with_replay else None

    def update(self, logits: Tensor, label: Tensor, tau: Tensor) -> None:
        """Adds ``(N,)`` logits and labels of uncropped states, and ``(B,)`` thresholds."""
        prob = logits.sigmoid()
        self.auroc.update(prob, label.long())
        self.average_precision.update(prob, label.long())
        self.even.update(logits, label)
        self.calibration.update(prob, label)
        self.tau_mean.update(tau)
        self.tau_square.update(tau.square())
        self.tau_prob.update(tau.sigmoid())

    def compute(self) -> dict[str, Tensor]:
        proxy, even = self.proxy.compute(), self.even.compute()
        tau_mean = self.tau_mean.compute()
        tau_variance = (self.tau_square.compute() - tau_mean.square()).clamp_min(0.0)
        scores = {
            "val/rollout_proxy_f0_5": proxy.pop("f_beta"),
            **{f"val/rollout_proxy_{name}": value for name, value in proxy.items()},
            "val/auroc": self.auroc.compute(),
            "val/average_precision": self.average_precision.compute(),
            "val/accuracy": even["accuracy"],
            "val/accept_rate": even["accept_rate"],
            "val/positive_rate": even["positive_rate"],
            "val/calibration_error": self.calibration.compute()["ece"],
            "val/tau_mean": tau_mean,
            "val/tau_std": tau_variance.sqrt(),
            "val/tau_prob": self.tau_prob.compute(),
        }
        if self.replay is not None:
            scores |= {f"val/replay_{name}": v for name, v in self.replay.compute().items()}
        return scores

    def reset(self) -> None:
        for metric in self.children():
            assert isinstance(metric, Metric)
            metric.reset()


class RolloutProxy(Metric):
    """Precision, recall and F-beta of acceptances at a fixed decision threshold, micro-averaged.

    The checkpoint metric of the TraceLock release (``rollout proxy F0.5``, arXiv 2605.24697): a
    proposal is accepted iff ``sigmoid(decision logit) >= threshold``. Beta below 1 weighs
    precision, because a wrong acceptance cannot be undone. No window or cap enters it.
    """

    full_state_update = False

    counts: Tensor

    def __init__(self, *, threshold: float = 0.99) -> None:
        super().__init__()
        self._limit = as_logit(threshold)
        self.add_state("counts", torch.zeros(4, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, decision_logits: Tensor, label: Tensor) -> None:
        """Counts ``(N,)`` decisions and whether each proposal is the trace's final token."""
        accept = decision_logits >= self._limit
        kinds = (accept & label, accept & ~label, ~accept & label, ~accept & ~label)
        self.counts += torch.stack([kind.sum() for kind in kinds])

    def compute(self) -> dict[str, Tensor]:
        """Scalars over everything seen, each 0 where its denominator is empty.

        ``fpr`` is the false positive rate, ``npv`` the negative predictive value.
        """
        tp, fp, fn, tn = self.counts.double()
        total = self.counts.sum().double()
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
    ``f / c`` wrong tokens per token written. It is an estimate: the states are those of the stored
    traces and not those that the policy's own commits lead to.
    """

    full_state_update = False

    sums: Tensor
    num_tokens: Tensor

    def __init__(self, *, num_bins: int = 16) -> None:
        super().__init__()
        self.num_bins = num_bins  # of the masked share
        # Of each bin: states, steps per token and wrong tokens per token.
        zeros = torch.zeros(3, num_bins, dtype=torch.float64)
        self.add_state("sums", zeros, dist_reduce_fx="sum")
        zero = torch.tensor(0.0, dtype=torch.float64)
        self.add_state("num_tokens", zero, dist_reduce_fx="sum")

    def update(self, commit: Tensor, label: Tensor, masked: Tensor, length: Tensor) -> None:
        """Adds states; rows without a commit do not count.

        ``commit``, ``label`` (the proposal is the trace's final token) and ``masked`` are
        ``(B, R)`` bool, ``length`` is ``(B,)`` response positions.
        """
        num_commits = commit.sum(1)
        chosen = num_commits > 0
        num_commits = num_commits[chosen].double()
        num_false = (commit & ~label).sum(1)[chosen].double()
        length = length[chosen]
        # Averaged over bins of the masked share with equal weights, because a decode passes through
        # all of them, whatever the stored states are.
        share = masked.sum(1)[chosen] / length.clamp_min(1)
        # A share of 1 / num_bins is the upper end of the first bin.
        bins = ((share * self.num_bins).ceil().long() - 1).clamp(0, self.num_bins - 1)
        values = (torch.ones_like(num_commits), 1.0 / num_commits, num_false / num_commits)
        self.sums.index_add_(1, bins, torch.stack(values))
        self.num_tokens += length.double().sum()

    def compute(self) -> dict[str, Tensor]:
        """Scalars over everything seen, all 0 without data.

        ``steps`` and ``false_commits`` are per trace, ``score`` is F-beta of ``1 - false_rate`` and
        of the saved share of the steps.
        """
        states = self.sums[0]
        seen = states > 0
        means = self.sums[1:] / states.clamp_min(1)
        steps_ratio, false_rate = means[:, seen].sum(1) / seen.sum().clamp_min(1)
        # The number of tokens turns both into counts per trace.
        length = self.num_tokens / states.sum().clamp_min(1)
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

    full_state_update = False

    sums: Tensor

    def __init__(self, *, num_bins: int = 20) -> None:
        super().__init__()
        self.num_bins = num_bins
        zeros = torch.zeros(3, num_bins, dtype=torch.float64)
        self.add_state("sums", zeros, dist_reduce_fx="sum")

    def update(self, prob: Tensor, label: Tensor) -> None:
        """Adds ``(N,)`` probabilities and labels."""
        bins = (prob * self.num_bins).long().clamp(0, self.num_bins - 1)
        values = torch.stack([torch.ones_like(prob), prob, label.to(prob.dtype)])
        self.sums.index_add_(1, bins, values.to(self.sums.dtype))

    def compute(self) -> dict[str, Tensor]:
        """Returns ``ece`` (0 without data), ``(num_bins,)`` means (NaN if empty) and counts."""
        count, prob_sum, label_sum = self.sums
        gap = (prob_sum - label_sum).abs().sum()
        return {
            "ece": (gap / count.sum().clamp_min(1)).float(),
            "prob": (prob_sum / count).float(),
            "accuracy": (label_sum / count).float(),
            "count": count.long(),
        }


# -- what a policy would commit in stored states ---------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SelectionSettings(CommitSettings):
    """How validation decodes; use what the benchmark will use."""

    window: Window | None = None
    """Where a step may commit; by default the whole response, or a block model's own blocks."""
    settings: DecodeSettings = field(default_factory=DecodeSettings)
    """Engine options, of which only the end-of-text gate is used."""


def step_candidates(
    batch: StateBatch, proposals: Tensor, backbone: Backbone, selection: SelectionSettings
) -> tuple[Tensor, Tensor]:
    """Returns what a decode could commit in each state, and what its policy would see.

    That is ``(B, L)`` bool each, candidates being those after window and gate. ``proposals`` are
    ``(B, L)`` int64; outside the response they are the tokens of the canvas.
    """
    columns = torch.arange(batch.ids.shape[1], device=batch.ids.device)
    in_response = (columns >= batch.start) & batch.pad_mask
    # A stored state is made a decode's again, so that its own window and gate answer.
    canvas = Canvas(
        ids=torch.where(batch.pad_mask, batch.ids, backbone.spec.pad_id),
        editable=in_response,
        seeds=torch.zeros_like(batch.ids[:, 0]),
        start=batch.start,
        pad_mask=batch.pad_mask,
    )
    state = initial_state(backbone.spec, canvas)
    window = selection.window or default_window(backbone.spec)
    one_of(0, of="selection.window.", steps=window.steps)  # a stored state does not tell its step
    candidates = window.view(state).candidates
    if selection.settings.eos_gate:
        candidates = end_of_text_gate(state, candidates, proposals)
    return candidates, left_of_window_end(state.masked, candidates) & batch.pad_mask


def step_commits(logits: Tensor, candidates: Tensor, selection: SelectionSettings) -> Tensor:
    """Returns which ``(B, R)`` bool candidates are accepted under the cap; the best if none is."""
    commit = accepted(
        logits, candidates, threshold=selection.threshold, max_accept=selection.max_accept_per_step
    )
    # What the stall rule ``top1`` does in a decode.
    fallback = top_quota(logits, candidates, 1)
    return torch.where(commit.any(1, keepdim=True), commit, fallback)
