"""One progress bar for a whole run: of all loaders, steps and epochs."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar

from lit_dlm.modules.decode import PromptStream

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES = 30.0


class ProgressBar(RichProgressBar):
    """Rich progress bar that speaks of the whole run.

    Lightning starts a new bar for each loader of ``predict``, whose remaining time is that of one
    method only; here one bar covers all of them and names the one that is running. In ``fit`` the
    bar is an epoch's, and its description tells how far the run is and how long it still takes.
    Where output is no terminal (a file, a cluster's log), a line is logged every half minute, since
    rich draws nothing there until the end.
    """

    _rollout_line: Any = None
    _told_at = 0.0
    _fit_began_at = 0.0
    _fit_began_with = 0.0

    @property
    def total_train_batches(self) -> int | float:
        """Batches of the epoch, or as many as ``max_steps`` leaves of it."""
        trainer = self.trainer
        total = trainer.num_training_batches
        if trainer.max_steps <= 0 or not total:
            return total
        # A run may go on in the middle of an epoch; at the start of one, this is still the last's.
        done = trainer.fit_loop.epoch_loop.batch_progress.current.completed % total
        left = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
        return min(total, done + left)

    def on_rollout_progress(self, text: str, done: int, total: int) -> bool:
        """Shows how far the rollouts between two epochs are, on a line of their own.

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

    def _drop_rollout_line(self) -> None:
        if self.progress is not None and self._rollout_line is not None:
            self.progress.remove_task(self._rollout_line)
        self._rollout_line = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock, from which the time left is reckoned."""
        super().on_train_start(trainer, pl_module)
        self._fit_began_at = time.monotonic()
        self._fit_began_with = _share_done(trainer, 0)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Counts the batch and tells the time left of the run."""
        bar = self.train_progress_bar_id
        if not self.is_disabled and self.progress is not None and bar is not None:
            text = self._get_train_description(trainer.current_epoch, batch_idx + 1)
            self.progress.update(bar, description=text)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def _get_train_description(self, current_epoch: int, num_batches: int = 0) -> str:
        trainer = self.trainer
        text = f"Epoch {current_epoch + 1}"
        if (trainer.max_epochs or -1) > 0:
            text += f" of {trainer.max_epochs}"
        if trainer.max_steps > 0:
            text += f", step {trainer.global_step} of {trainer.max_steps}"
        share = _share_done(trainer, num_batches)
        since = share - self._fit_began_with
        if since > 0 and share < 1:
            seconds = (time.monotonic() - self._fit_began_at) * (1 - share) / since
            text += f", {timedelta(seconds=round(seconds))} left"
        return text

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """The logged values, without the logger's version, which rich would show as a number."""
        items = super().get_metrics(trainer, pl_module)
        items.pop("v_num", None)
        return items

    def refresh(self, hard: bool = False) -> None:
        """Draws the bars; without a terminal, logs a line now and then."""
        super().refresh(hard)
        if self.progress is None or _draws(self.progress.console):
            return
        now = time.monotonic()
        tasks = [task for task in self.progress.tasks if task.visible and not task.finished]
        if tasks and now - self._told_at >= _SECONDS_BETWEEN_LINES:
            if self._told_at:
                logger.info(" · ".join(map(_line, tasks)))
            self._told_at = now

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
        if isinstance(batch, PromptStream):
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


def _share_done(trainer: Trainer, num_batches: int) -> float:
    """Share of ``fit`` that is done: by epochs or by steps, whichever ends it first."""
    shares = [0.0]
    if trainer.max_epochs is not None and trainer.max_epochs > 0:
        share = min(num_batches / max(trainer.num_training_batches, 1), 1.0)
        shares.append((trainer.current_epoch + share) / trainer.max_epochs)
    if trainer.max_steps > 0:
        shares.append(trainer.global_step / trainer.max_steps)
    return max(shares)


def _draws(console: Any) -> bool:
    return bool(console.is_terminal or console.is_jupyter)


def _line(task: Any) -> str:
    """Description, count and time left of one bar; only what the description lacks."""
    total = "?" if task.total in (None, float("inf")) else int(task.total)
    count = f"{int(task.completed)}/{total}"
    parts = [task.description.strip()]
    if count not in parts[0]:
        parts.append(count)
    if task.time_remaining is not None and not parts[0].endswith(" left"):
        parts.append(f"{timedelta(seconds=int(task.time_remaining))} left")
    return ", ".join(parts)
