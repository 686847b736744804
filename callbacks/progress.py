"""Progress of a run: one bar for all of it, or lines in the log where there is no terminal."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, RichProgressBar
from lightning.pytorch.loggers import CSVLogger
from rich import get_console
from rich.progress import BarColumn, TextColumn
from rich.text import Text
from torch import Tensor

from lit_dlm.predict.decode import DecodedBatch, PromptStream, StreamCalls
from lit_dlm.reports.plots import THEMES, curve_figure, read_curves, save_figure

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES = 30.0
_SECONDS_BETWEEN_VALUES = 0.5  # reading values waits for the device
_SHOWN = re.compile(r"(train|rollout|val)/(loss|nelbo|reward|correct|accuracy)")
"""Names of logged values that show how training goes; ``time/reward``, in seconds, does not."""
_NEW_SHARE = 0.1  # weight of a batch's loss in the smoothed one, which is over about ten
_BAR_WIDTH = 8


class TrainingLog(Callback):
    """Reports the progress of a run: values for the bar, and log lines where no bar is drawn.

    Training of fewer steps than ``log_every_n_steps`` is logged at its last step, instead of not at
    all. At its end, the curves of Lightning's CSV logger are drawn into ``curves.png`` of the
    trainer's root directory.
    """

    def __init__(self) -> None:
        self._batch_at = self._told_at = 0.0
        self._began: tuple[float, float] = (0.0, 0.0)  # when, and the share done then
        self._seconds = 0.0
        self._tokens = self._first = self._num_batches = self._num_ended = 0
        self._loss: Tensor | None = None  # smoothed, on the device
        self._rate: float | None = None  # of the last step

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        count = trainer.estimated_stepping_batches
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and count != float("inf"):
            trainer.log_every_n_steps = max(1, min(every, int(count)))  # type: ignore[attr-defined]
        sizes = [(one.numel(), one.requires_grad) for one in pl_module.parameters()]
        trained = sum(size for size, is_trained in sizes if is_trained)
        if trainer.is_global_zero:
            whole = sum(size for size, _ in sizes)
            logger.info("training %s of %s parameters", f"{trained:,}", f"{whole:,}")
        # A resumed run is as far as its checkpoint; the time of others says nothing of its speed.
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        self._told_at = time.monotonic()
        self._began = (self._told_at, _share_done(trainer, batches))
        self._first, self._seconds, self._tokens = trainer.global_step, 0.0, 0
        self._loss = self._rate = None

    def on_before_optimizer_step(self, trainer: Trainer, *args: Any) -> None:
        # Later, the schedule has set the rate of the next step: at the end, often 0.
        self._rate = trainer.optimizers[0].param_groups[0]["lr"]

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        # The time between batches is for loading, rollouts or validation, and not counted.
        self._batch_at = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._seconds += time.monotonic() - self._batch_at
        # Batches of RL have their tokens one level below those of fine-tuning.
        ids = getattr(getattr(batch, "responses", batch), "ids", None)
        self._tokens += 0 if ids is None else ids.numel() * trainer.world_size
        if outputs and "loss" in outputs:  # reading what was logged would wait for the device
            loss = outputs["loss"].detach() * trainer.accumulate_grad_batches
            self._loss = loss if self._loss is None else self._loss.lerp(loss, _NEW_SHARE)
        share = _share_done(trainer, batch_idx + 1)
        self._tell(trainer, lambda: (share, self._fit_line(trainer, batch_idx + 1)))

    def _fit_line(self, trainer: Trainer, num_batches: int) -> str:
        """Returns progress, remaining time and values, ``num_batches`` into an epoch."""
        text = f"Epoch {trainer.current_epoch + 1}"
        if (trainer.max_epochs or -1) > 0:
            text += f" of {trainer.max_epochs}"
        text += f", step {trainer.global_step}"
        if trainer.max_steps > 0:
            text += f" of {trainer.max_steps}"
        left = _time_left(self._began, _share_done(trainer, num_batches))
        return f"{text}{left}: {self._line(trainer)}"

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            for bar in _bars(trainer):
                bar.show(1.0, self._fit_line(trainer, 0))
            spent = timedelta(seconds=round(time.monotonic() - self._began[0]))
            steps = trainer.global_step - self._first
            logger.info("%d steps in %s: %s", steps, spent, self._line(trainer))
            if not trainer.fast_dev_run:  # type: ignore[attr-defined]
                _show_logs(trainer)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._told_at = time.monotonic()
        self._began = (self._told_at, 0.0)
        self._tokens = self._num_batches = self._num_ended = 0

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self._num_batches += 1
        if isinstance(outputs, DecodedBatch):  # the other processes are about as far
            self._num_ended += len(outputs.examples) * trainer.world_size
            self._tokens += sum(outputs.num_tokens) * trainer.world_size
        self._tell(trainer, lambda: self._decoded(trainer, batch, self._num_batches), at_once=True)

    def on_decode_step(self, trainer: Trainer, batch: Any, done: Callable[[], float]) -> None:
        """Tells how far decoding is: ``done()`` returns how many of all batches are done."""
        self._tell(trainer, lambda: self._decoded(trainer, batch, done()))

    def _decoded(self, trainer: Trainer, batch: Any, done: float) -> tuple[float, str]:
        """Returns the share done, and a line; its tokens are those of responses that have ended."""
        share = done / max(sum(trainer.num_predict_batches), 1)
        loaders: Any = trainer.predict_dataloaders
        loaders = loaders if isinstance(loaders, list) else [loaders]
        sets = (getattr(one, "dataset", None) for one in loaders)
        total = sum(len(one.stream.examples) for one in sets if isinstance(one, StreamCalls))
        line = f"{min(self._num_ended, total):,} of {total:,} prompts ({100 * share:.0f} %)"
        if self._tokens:
            speed = self._tokens / max(time.monotonic() - self._began[0], 1e-9)
            line += f", {speed:,.{1 if speed < 10 else 0}f} tokens/s"
        is_ours = isinstance(batch, PromptStream)
        what = f"{batch.examples[0].task} · {batch.method}" if is_ours else "Predicting"
        return share, f"{line}{_time_left(self._began, share)}: {what}"

    def _tell(
        self, trainer: Trainer, told: Callable[[], tuple[float, str]], *, at_once: bool = False
    ) -> None:
        """Draws a share and a line, or logs the line, from time to time; ``at_once`` draws now."""
        now, bars = time.monotonic(), _bars(trainer)
        pause = _SECONDS_BETWEEN_VALUES if bars else _SECONDS_BETWEEN_LINES
        if trainer.is_global_zero and (now - self._told_at >= pause or (bars and at_once)):
            self._told_at = now
            share, line = told()
            for bar in bars:
                bar.show(share, line)
            if not bars:  # it would tear them
                logger.info(line)

    def _line(self, trainer: Trainer) -> str:
        values = self.values(trainer)
        return ", ".join(f"{name} {value}" for name, value in values.items()) or "nothing logged"

    def values(self, trainer: Trainer) -> dict[str, str]:
        """Returns the smoothed loss, the last logged reward and accuracy, tokens/s and the rate.

        Tokens are those of the training batches of all processes, prompts and padding included,
        divided by the time that their steps took. The learning rate is that of the last step.
        """
        values = {}
        if self._tokens and self._seconds:
            values["tokens/s"] = f"{self._tokens / self._seconds:,.0f}"
        for name, value in trainer.callback_metrics.items():
            if shown := _SHOWN.fullmatch(name):
                stage, last = shown.groups()
                # One name for each kind of value, whichever method logged it.
                last = {"correct": "accuracy", "nelbo": "loss"}.get(last, last)
                values[f"val {last}" if stage == "val" else last] = f"{float(value):.4g}"
        if self._loss is not None:
            values["loss"] = f"{float(self._loss):.4g}"
        if self._rate is not None:
            values["lr"] = f"{self._rate:.3g}"
        return values


class ProgressBar(RichProgressBar):
    """Draws what :class:`TrainingLog` tells as one line for the whole run, where it has a terminal.

    Lightning draws a bar for each epoch of ``fit`` and each loader of ``predict``, whose remaining
    time is that of this part only.
    """

    def __init__(self) -> None:
        super().__init__()
        console = get_console()
        if not (console.is_terminal or console.is_jupyter):
            self.disable()

    def configure_columns(self, trainer: Trainer) -> list[Any]:
        text = TextColumn("{task.description}", markup=False)
        return [BarColumn(bar_width=_BAR_WIDTH), text]

    def show(self, share: float, text: str) -> None:
        """Draws a share in [0, 1], and as much of a text as there is room for."""
        if self.progress is None:
            return
        if self.predict_progress_bar_id is None:  # of ``fit``, too: those of training have values
            self.predict_progress_bar_id = self._add_task(1.0, "")
        line = Text(text)
        # A line that is wrapped could not be drawn over; the columns have gaps between them.
        line.truncate(self.progress.console.width - _BAR_WIDTH - 3, overflow="ellipsis")
        # Parts of later batches may have been done before.
        share = max(share, self.progress.tasks[self.predict_progress_bar_id].completed)
        self.progress.update(self.predict_progress_bar_id, completed=share, description=line.plain)
        self.refresh()

    def _draw_nothing(self, *_: Any, **__: Any) -> None:
        """Takes the place of Lightning's own bars."""

    on_train_epoch_start = on_train_batch_end = _draw_nothing
    on_predict_batch_start = on_predict_batch_end = _draw_nothing

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_predict_end(trainer, pl_module)
        self._stop_progress()  # so that tables come below it


def _bars(trainer: Trainer) -> list[ProgressBar]:
    callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
    return [one for one in callbacks if isinstance(one, ProgressBar) and one.is_enabled]


def _show_logs(trainer: Trainer) -> None:
    """Tells where the logs of a ``fit`` are, and draws those of the CSV logger."""
    for one in trainer.loggers:
        if where := getattr(one, "log_dir", None) or one.save_dir:
            logger.info("Logs: %s", where)
        if isinstance(one, CSVLogger):
            one.save()  # it keeps the last lines until later
            path = Path(trainer.default_root_dir) / "curves.png"
            # Of the runs that this one goes on from, too.
            if curves := read_curves(Path(one.root_dir)):
                save_figure(curve_figure(curves, THEMES["light"]), path)
                logger.info("Curves: %s", path)


def _time_left(began: tuple[float, float], share: float) -> str:
    since = share - began[1]
    if since <= 0 or share >= 1:
        return ""
    seconds = (time.monotonic() - began[0]) * (1 - share) / since
    return f", {timedelta(seconds=round(seconds))} left"


def _share_done(trainer: Trainer, num_batches: int) -> float:
    """Share of ``fit`` that is done: by epochs or by steps, whichever ends it first."""
    shares = [0.0]
    if trainer.max_epochs is not None and trainer.max_epochs > 0:
        share = min(num_batches / max(trainer.num_training_batches, 1), 1.0)
        shares.append((trainer.current_epoch + share) / trainer.max_epochs)
    if trainer.max_steps > 0:
        shares.append(trainer.global_step / trainer.max_steps)
    return max(shares)
