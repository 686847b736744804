"""All validation scores of an acceptance policy that need no decode, in one object."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision

from lit_dlm.metrics.acceptance import RolloutProxy, ThresholdScan
from lit_dlm.metrics.calibration import CalibrationCurve
from lit_dlm.metrics.replay import ReplayScore


class AcceptanceScores(nn.Module):
    """Metrics of one validation; their sums cover all processes.

    The module updates ``proxy`` and ``replay`` itself, on the positions that these are about.
    """

    def __init__(self, *, proxy_threshold: float, with_scan: bool, with_replay: bool) -> None:
        """Sets up the metrics.

        Args:
            proxy_threshold: acceptance probability of the rollout proxy.
            with_scan: search a fixed threshold (for networks without a dynamic one).
            with_replay: score what a decode would commit.
        """
        super().__init__()
        self.proxy = RolloutProxy(threshold=proxy_threshold)
        self.even = RolloutProxy(threshold=0.5)
        self.auroc = BinaryAUROC()
        self.average_precision = BinaryAveragePrecision()
        self.calibration = CalibrationCurve()
        self.tau_mean, self.tau_square = MeanMetric(), MeanMetric()
        self.tau_prob = MeanMetric()
        self.scan = ThresholdScan() if with_scan else None
        self.replay = ReplayScore() if with_replay else None

    def update(
        self, logits: Tensor, label: Tensor, tau: Tensor, generator: torch.Generator
    ) -> None:
        """Adds the uncropped states of a batch.

        Args:
            logits: ``(N,)`` decision logits of the evaluated positions.
            label: ``(N,)`` bool.
            tau: ``(B,)`` thresholds of the real states.
            generator: on the CPU; draws the positions that choose a fixed threshold.
        """
        prob = logits.sigmoid()
        self.auroc.update(prob, label.long())
        self.average_precision.update(prob, label.long())
        self.even.update(logits, label)
        self.calibration.update(prob, label)
        self.tau_mean.update(tau)
        self.tau_square.update(tau.square())
        self.tau_prob.update(tau.sigmoid())
        if self.scan is not None:
            self.scan.update(logits, label, generator)

    def compute(self) -> dict[str, Tensor]:
        """Scalars by the names under which they are logged."""
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
        if self.scan is not None:
            scores |= {f"val/scan_{name}": value for name, value in self.scan.compute().items()}
        if self.replay is not None:
            scores |= {f"val/replay_{name}": v for name, v in self.replay.compute().items()}
        return scores

    def reset(self) -> None:
        """Forgets everything, for the next validation."""
        for metric in self.children():
            assert isinstance(metric, Metric)
            metric.reset()
