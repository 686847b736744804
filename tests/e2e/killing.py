"""Callbacks that signal their own process, as ``kill -9`` would, at a chosen point of a run."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer


class KillBefore(Callback):
    """Signals a process before a batch (in training a step) once files hold so many bytes.

    So it comes neither too early nor too late; the writer's thread may be behind.
    """

    def __init__(
        self, batch: int, folder: str, files: str, num_bytes: int, number: int, rank: int
    ) -> None:
        self.batch, self.number, self.rank = batch, number, rank
        self.folder, self.files, self.num_bytes = Path(folder), files, num_bytes

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self._kill_before(trainer.global_step, trainer)

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int, *args: Any
    ) -> None:
        self._kill_before(batch_idx, trainer)

    def _kill_before(self, number: int, trainer: Trainer) -> None:
        if number == self.batch and trainer.global_rank == self.rank:
            while sum(f.stat().st_size for f in self.folder.glob(self.files)) < self.num_bytes:
                time.sleep(0.01)
            os.kill(os.getpid(), self.number)


class LoseNode(KillBefore):
    """Kills the second node, its agent too, before a batch or an optimiser step."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def _kill_before(self, number: int, trainer: Trainer) -> None:
        if number == self.batch and os.environ["NODE"] == "1":
            os.killpg(0, signal.SIGKILL)
