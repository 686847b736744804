"""A callback that signals its own process, as ``kill -9`` would, at a chosen point of a run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer


class KillBefore(Callback):
    """Kills the run before a batch, so that the kill comes neither too early nor too late.

    Args:
        batch: number of the batch; training counts optimiser steps.
        files: pattern of files below ``folder`` that must have been written by then; the writer's
            thread may be behind.
        folder: of the run.
        num_bytes: how much they must hold together.
        number: the signal.
        rank: the process that is signalled.
    """

    def __init__(
        self,
        batch: int,
        folder: str,
        files: str,
        num_bytes: int = 1,
        number: int = signal.SIGKILL,
        rank: int = 0,
    ) -> None:
        self.number = number
        self.rank = rank
        self.batch = batch
        self.folder = Path(folder)
        self.files = files
        self.num_bytes = num_bytes

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self._kill_before(trainer.global_step, trainer)

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int, *args: Any
    ) -> None:
        self._kill_before(batch_idx, trainer)

    def _kill_before(self, number: int, trainer: Trainer) -> None:
        if number == self.batch and trainer.global_rank == self.rank:
            while self._size() < self.num_bytes:
                time.sleep(0.01)
            os.kill(os.getpid(), self.number)

    def _size(self) -> int:
        return sum(path.stat().st_size for path in self.folder.glob(self.files))
