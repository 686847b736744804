"""How far a run is and how it goes: one bar for all of it, and lines where there is no bar."""

from __future__ import annotations

import logging
import re
import time
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, RichProgressBar

from lit_dlm.modules.decode import PromptStream

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES = 30.0
_SECONDS_BETWEEN_VALUES = 0.5
"""Reading them waits for the device."""
_SHOWN = re.compile(r"(train|rollout|val)/(loss|nelbo|reward|correct|accuracy)")
"""Names of logged values that say how training goes; ``time/reward`` are seconds."""


class TrainingLog(Callback):
    """Says how training goes: its values for the bar, and lines where no bar is drawn.

    The beginning tells how many parameters are trained, the end the last values. A run of fewer
    steps than ``log_every_n_steps`` is logged at its last one, instead of not at all.
    """

    def __init__(self) -> None:
        self._began_at = self._batch_at = self._told_at = 0.0
        self._seconds = 0.0
        self._tokens = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Counts parameters, and sees that something is logged."""
        count = trainer.estimated_stepping_batches
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and count != float("inf"):
            trainer.log_every_n_steps = max(1, min(every, int(count)))  # type: ignore[attr-defined]
        sizes = [(one.numel(), one.requires_grad) for one in pl_module.parameters()]
        trained = sum(size for size, is_trained in sizes if is_trained)
        if trainer.is_global_zero:
            whole = sum(size for size, _ in sizes)
            logger.info("training %s of %s parameters", f"{trained:,}", f"{whole:,}")
        self._began_at = self._told_at = time.monotonic()
        self._seconds, self._tokens = 0.0, 0

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Starts the clock of a batch; what lies between is loading, rolling out or validating."""
        self._batch_at = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts tokens; where nothing is drawn, a line is logged every half minute."""
        now = time.monotonic()
        self._seconds += now - self._batch_at
        ids = getattr(getattr(batch, "responses", batch), "ids", None)
        self._tokens += 0 if ids is None else ids.numel() * trainer.world_size
        bars = [one for one in trainer.callbacks if isinstance(one, ProgressBar)]  # type: ignore[attr-defined]
        if bars or not trainer.is_global_zero or now - self._told_at < _SECONDS_BETWEEN_LINES:
            return
        self._told_at = now
        logger.info("epoch %d, step %d: %s", trainer.current_epoch + 1, trainer.global_step,
                    self.spoken(trainer))  # fmt: skip

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tells the last values."""
        if trainer.is_global_zero:
            spent = timedelta(seconds=round(time.monotonic() - self._began_at))
            logger.info("%d steps in %s: %s", trainer.global_step, spent, self.spoken(trainer))

    def spoken(self, trainer: Trainer) -> str:
        """The values in a line."""
        values = self.values(trainer)
        return ", ".join(f"{name} {value}" for name, value in values.items()) or "nothing logged"

    def values(self, trainer: Trainer) -> dict[str, str]:
        """Loss, reward and accuracy as logged last, the learning rate, and tokens a second.

        Tokens are those of the training batches of all processes, prompts and padding included,
        over the time that their steps took.
        """
        found = {}
        for name, value in trainer.callback_metrics.items():
            if shown := _SHOWN.fullmatch(name):
                stage, last = shown.groups()
                last = {"correct": "accuracy", "nelbo": "loss"}.get(last, last)
                found[f"val {last}" if stage == "val" else last] = f"{float(value):.4g}"
        if trainer.optimizers:
            found["lr"] = f"{trainer.optimizers[0].param_groups[0]['lr']:.3g}"
        if self._tokens and self._seconds:
            found["tokens/s"] = f"{self._tokens / self._seconds:,.0f}"
        return found


class ProgressBar(RichProgressBar):
    """Rich progress bar that speaks of the whole run.

    Lightning starts a new bar for each loader of ``predict``, whose remaining time is that of one
    method only; here one bar covers all of them and names the one that is running. In ``fit`` the
    bar is an epoch's, and its description tells how far the run is and how long it still takes.
    Where output is no terminal (a file, a cluster's log), nothing is drawn, and a line is logged
    every half minute.
    """

    _rollout_line: Any = None
    _values: dict[str, str] = {}  # noqa: RUF012  (replaced, never changed)
    _values_at = 0.0
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
        for one in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(one, TrainingLog) and trainer.training:
                now = time.monotonic()
                if not self._values or now - self._values_at > _SECONDS_BETWEEN_VALUES:
                    self._values, self._values_at = one.values(trainer), now
                items = {k: v for k, v in items.items() if "/" not in k} | self._values
        return items

    def _stop_progress(self) -> None:
        if self.progress is None or _draws(self.progress.console):
            super()._stop_progress()
        else:  # rich would write the last state into the file
            self.progress.live.transient = True
            self.progress.live.stop()
            self._progress_stopped = True

    def refresh(self, hard: bool = False) -> None:
        """Draws the bars; without a terminal, logs a line now and then."""
        super().refresh(hard)
        if self.progress is None or _draws(self.progress.console):
            return
        now = time.monotonic()
        tasks = [task for task in self.progress.tasks if task.visible and not task.finished]
        if tasks and now - self._told_at >= _SECONDS_BETWEEN_LINES:
            if self._told_at:
                logs = [one for one in self.trainer.callbacks if isinstance(one, TrainingLog)]  # type: ignore[attr-defined]
                told = [one.spoken(self.trainer) for one in logs if self.trainer.training]
                logger.info(" · ".join([*map(_line, tasks), *told]))
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
