"""Curves that are drawn during a run: rewards of TraceRL, calibration of TraceLock."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_dlm.reports.plots import plot_calibration, plot_run, write_calibration, write_points
from lit_dlm.rl.module import TraceRLModule
from lit_dlm.system.options import of_kind
from lit_dlm.tracelock.module import TraceLockModule

logger = logging.getLogger(__name__)

_DRAW_SECONDS = 30.0  # least time between two drawings of the plot, which is also drawn at the end


class RewardCurve(Callback):
    """Keeps ``reward_curve.jsonl`` and ``reward_curve.png`` up to date.

    A line holds everything that one RL step logged, and nothing of an earlier one. Step 0 is the
    initial policy, if the trainer validates on everything before training
    (``num_sanity_val_steps: -1``, as the module sets it); the validation in line ``n`` is that of
    the policy after ``n`` RL steps. Checkpoints hold the curve, and a resumed run continues it.
    """

    writes_files = True

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)
        self._drawn = -math.inf
        self.points: list[dict[str, Any]] = []

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            of_kind(pl_module, TraceRLModule, option="model")

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        # A resumed run has a sanity check, too, but its step 0 is known already.
        is_first = trainer.sanity_checking and not self.points
        # Scores of only some batches could not be compared with later validations.
        is_whole = trainer.num_sanity_val_steps >= max(trainer.num_val_batches, default=0)
        if is_first and is_whole:
            validation = pl_module.loop.validation
            scores = {} if validation is None else validation.last
            values = {f"val/{name}": value for name, value in scores.items()}
            self.points = [{"step": 0, "updates": 0, **values}]

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        values = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if _is_new(name, trainer, pl_module)
        }
        step = trainer.current_epoch + 1
        # A resumed run repeats steps after its checkpoint: their points are replaced.
        self.points = [point for point in self.points if point["step"] < step]
        self.points.append({"step": step, "updates": trainer.global_step, **values})
        if trainer.is_global_zero:
            write_points(self.points, self.folder / "reward_curve.jsonl")
            if time.monotonic() - self._drawn > _DRAW_SECONDS:
                self._draw()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and self.points:
            self._draw()
            logger.info("Reward curve: %s", self.folder / "reward_curve.png")

    def _draw(self) -> None:
        plot_run(self.points, self.folder / "reward_curve.png")
        self._drawn = time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        return {"points": self.points}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.points = list(state_dict["points"])


def _is_new(name: str, trainer: Trainer, module: TraceRLModule) -> bool:
    """Whether this RL step logged a metric; the trainer also keeps those of earlier ones."""
    kind = name.partition("/")[0]
    if kind == "val":
        return (trainer.current_epoch + 1) % (trainer.check_val_every_n_epoch or 1) == 0
    metrics = module.loop.current.metrics
    if kind == "train":  # only logged where something is learnt
        return metrics.get("rollout/items", 1.0) > 0.0
    return kind not in ("rollout", "time") or name in metrics or name == "time/train"


class CalibrationPlot(Callback):
    """Keeps ``calibration.json`` and ``calibration.png`` of the last validation in a folder."""

    writes_files = True

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        curve = of_kind(pl_module, TraceLockModule, option="model").calibration_curve
        if trainer.sanity_checking or not trainer.is_global_zero or curve is None:
            return
        values = {name: value.tolist() for name, value in curve.items()}
        write_calibration(self.folder / "calibration.json", values, step=trainer.global_step)
        plot_calibration(values, self.folder / "calibration.png")
