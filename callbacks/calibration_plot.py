"""Writes the calibration curve of an acceptance policy after every validation."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_dlm.modules.tracelock import TraceLockModule
from lit_dlm.ops.options import of_kind
from lit_dlm.reports.plots import plot_calibration, write_calibration


class CalibrationPlot(Callback):
    """Keeps ``calibration.json`` and ``calibration.png`` of the last validation.

    Args:
        folder: where the files go.
    """

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
