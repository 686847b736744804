"""One progress bar for a whole predict run."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar

from lit_dlm.modules.decode import PromptBatch


class ProgressBar(RichProgressBar):
    """Rich progress bar that counts all loaders of ``predict`` together.

    Lightning starts a new bar for each loader, whose remaining time is that of one method only.
    Here the bar covers all of them and names the one that is running.
    """

    def on_rollout_progress(self, text: str, done: int, total: int) -> bool:
        """Shows how far the rollouts between two epochs are, on a line of their own.

        Args:
            text: what is going on, and the time left.
            done: how much of it is done.
            total: how much there is.

        Returns:
            Whether it is shown: there is no bar before training begins.
        """
        if self.is_disabled or self.progress is None:
            return False
        if done >= total:
            self._drop_rollout_line()
        elif self._rollout_line is None:
            self._rollout_line = self._add_task(total, text)
        else:
            self.progress.update(self._rollout_line, description=text, completed=done, total=total)
        self.refresh()
        return True

    _rollout_line: Any = None

    def _drop_rollout_line(self) -> None:
        if self.progress is not None and self._rollout_line is not None:
            self.progress.remove_task(self._rollout_line)
        self._rollout_line = None

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts to count."""
        super().on_predict_start(trainer, pl_module)
        self._num_done = 0

    def on_predict_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Shows the task and method of the batch."""
        if self.is_disabled:
            return
        label = self.predict_description
        if isinstance(batch, PromptBatch):
            label = f"{batch.examples[0].task} · {batch.method}"
        if self.predict_progress_bar_id is None:
            total = sum(trainer.num_predict_batches)
            self.predict_progress_bar_id = self._add_task(total, label)
        elif self.progress is not None:
            self.progress.update(self.predict_progress_bar_id, description=label)
        self.refresh()

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends the bar, so that tables come below it."""
        super().on_predict_end(trainer, pl_module)
        self._stop_progress()

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Counts the batch."""
        if self.is_disabled or self.predict_progress_bar_id is None:
            return
        self._num_done += 1
        self._update(self.predict_progress_bar_id, self._num_done)
        self.refresh()
