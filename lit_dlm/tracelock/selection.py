"""Validation scores of an acceptance policy in training.

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
from lit_dlm.tensors.sampling import top_quota
from lit_dlm.tracelock.metrics import CalibrationCurve, ReplayScore, RolloutProxy
from lit_dlm.tracelock.network import accepted
from lit_dlm.tracelock.policy import left_of_window_end
from lit_dlm.tracelock.scorer import CommitSettings
from lit_dlm.tracelock.states import StateBatch


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
    canvas = Canvas(
        ids=torch.where(batch.pad_mask, batch.ids, backbone.spec.pad_id),
        editable=in_response,
        seeds=torch.zeros_like(batch.ids[:, 0]),
        start=batch.start,
        pad_mask=batch.pad_mask,
    )
    state = initial_state(backbone.spec, canvas)
    candidates = (selection.window or default_window(backbone.spec)).view(state).candidates
    if selection.settings.eos_gate:
        candidates = end_of_text_gate(state, candidates, proposals)
    return candidates, left_of_window_end(state.masked, candidates) & batch.pad_mask


def step_commits(logits: Tensor, candidates: Tensor, selection: SelectionSettings) -> Tensor:
    """Returns which ``(B, R)`` bool candidates are accepted under the cap; the best if none is."""
    commit = accepted(
        logits, candidates, threshold=selection.threshold, max_accept=selection.max_accept_per_step
    )
    fallback = top_quota(logits, candidates, 1)
    return torch.where(commit.any(1, keepdim=True), commit, fallback)


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
