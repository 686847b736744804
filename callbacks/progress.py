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
from lightning.pytorch.callbacks.progress.rich_progress import CustomBarColumn
from lightning.pytorch.loggers import CSVLogger
from rich import get_console
from rich.progress import TextColumn
from rich.text import Text
from torch import Tensor

from lit_dlm.predict.decode import DecodedBatch, PromptStream, StreamCalls
from lit_dlm.reports.plots import curves_figure, read_curves, save_figure

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES = 30.0
_SECONDS_BETWEEN_VALUES = 0.5  # reading values waits for the device
_SHOWN = re.compile(r"(train|rollout|val)/(loss|nelbo|reward|correct|accuracy)")
"""Names of logged values that show how training goes; ``time/reward``, in seconds, does not."""
_SMOOTHED = {"train/loss", "train/nelbo"}
_NEW_SHARE = 0.1  # weight of a step's loss in the smoothed one, which is over about ten steps
_BAR_WIDTH = 8


class TrainingLog(Callback):
    """Reports the progress of a run: values for the bar, and log lines where no bar is drawn.

    Training of fewer steps than ``log_every_n_steps`` is logged at its last step, instead of not at
    all. At its end, the curves of Lightning's CSV logger are drawn into ``curves.png`` of the
    trainer's root directory.
    """

    def __init__(self) -> None:
        self._batch_at = self._logged_at = 0.0
        self._began: tuple[float, float] = (0.0, 0.0)  # when, and the share done then
        self._seconds = 0.0
        self._tokens = self._first = 0
        self._losses: dict[str, Tensor] = {}  # smoothed, on the device, by name
        self._rate: float | None = None  # of the last step
        self._decoded: DecodeCount

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
        self._logged_at = time.monotonic()
        self._began, self._first = _beginning(trainer), trainer.global_step
        self._seconds, self._tokens = 0.0, 0
        self._losses, self._rate = {}, None

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
        for name in _SMOOTHED & trainer.callback_metrics.keys():
            loss = trainer.callback_metrics[name]
            self._losses[name] = self._losses.get(name, loss).lerp(loss, _NEW_SHARE)
        if self._is_due(trainer):
            text = describe_fit(trainer, batch_idx + 1, self._began)
            logger.info("%s: %s", text, self.line(trainer))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            spent = timedelta(seconds=round(time.monotonic() - self._began[0]))
            steps = trainer.global_step - self._first
            logger.info("%d steps in %s: %s", steps, spent, self.line(trainer))
            if not trainer.fast_dev_run:  # type: ignore[attr-defined]
                _show_logs(trainer)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._logged_at = time.monotonic()
        self._decoded = DecodeCount(trainer)

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self._decoded.add(trainer, outputs)
        self.on_decode_step(trainer, batch, lambda: self._decoded.batches)

    def on_decode_step(self, trainer: Trainer, batch: Any, done: Callable[[], float]) -> None:
        """Logs how far decoding is: ``done()`` returns how many of all batches are done."""
        if self._is_due(trainer):
            logger.info(self._decoded.line(trainer, batch, done()))

    def _is_due(self, trainer: Trainer) -> bool:
        now = time.monotonic()
        if not trainer.is_global_zero or now - self._logged_at < _SECONDS_BETWEEN_LINES:
            return False
        self._logged_at = now
        # A line beside a bar would tear it.
        bars = [one for one in trainer.callbacks if isinstance(one, ProgressBar)]  # type: ignore[attr-defined]
        return all(bar.is_disabled for bar in bars)

    def line(self, trainer: Trainer) -> str:
        """Returns :meth:`values` as one text."""
        values = self.values(trainer)
        return ", ".join(f"{name} {value}" for name, value in values.items()) or "nothing logged"

    def values(self, trainer: Trainer) -> dict[str, str]:
        """Returns the smoothed loss, the last logged reward and accuracy, tokens/s and the rate.

        Tokens are those of the training batches of all processes, prompts and padding included,
        divided by the time that their steps took. The learning rate is that of the last step.
        """
        values = {}
        for name, value in (trainer.callback_metrics | self._losses).items():
            if shown := _SHOWN.fullmatch(name):
                stage, last = shown.groups()
                # One name for each kind of value, whichever method logged it.
                last = {"correct": "accuracy", "nelbo": "loss"}.get(last, last)
                values[f"val {last}" if stage == "val" else last] = f"{float(value):.4g}"
        if self._tokens and self._seconds:
            values["tokens/s"] = f"{self._tokens / self._seconds:,.0f}"
        if self._rate is not None:
            values["lr"] = f"{self._rate:.3g}"
        return values


class ProgressBar(RichProgressBar):
    """One line for the whole run, with a bar; nothing is drawn where there is no terminal.

    Lightning starts a new bar for each epoch of ``fit`` and each loader of ``predict``, whose
    remaining time is that of this part only.
    """

    def __init__(self) -> None:
        super().__init__()
        self._values = ""
        self._values_at = 0.0
        self._began = (0.0, 0.0)  # when training began, and the share done then
        self._decoded: DecodeCount
        self._shown = 0.0
        console = get_console()
        if not (console.is_terminal or console.is_jupyter):
            self.disable()

    def configure_columns(self, trainer: Trainer) -> list[Any]:
        text = TextColumn("{task.description}", markup=False)
        return [CustomBarColumn(bar_width=_BAR_WIDTH), text]

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        return {}  # they are in the line

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._began, self._values = _beginning(trainer), ""
        if self.progress is not None:
            self.train_progress_bar_id = self._add_task(1, "")
            self._show_fit(trainer, 0)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves the bar as it is: the base class would begin another one."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._show_fit(trainer, batch_idx + 1)

    def _show_fit(self, trainer: Trainer, num_batches: int) -> None:
        now = time.monotonic()
        logs = [one for one in trainer.callbacks if isinstance(one, TrainingLog)]  # type: ignore[attr-defined]
        if logs and (not self._values or now - self._values_at > _SECONDS_BETWEEN_VALUES):
            self._values, self._values_at = logs[0].line(trainer), now
        text = describe_fit(trainer, num_batches, self._began)
        text = f"{text}: {self._values}" if self._values else text
        self._show(self.train_progress_bar_id, _share_done(trainer, num_batches), text)

    def _show(self, bar: Any, done: float, text: str) -> None:
        if self.progress is not None and bar is not None:
            line = Text(text)
            # A line that is wrapped could not be drawn over; the last column is empty.
            line.truncate(self.progress.console.width - _BAR_WIDTH - 2, overflow="ellipsis")
            self.progress.update(bar, completed=done, description=line.plain)
            self.refresh()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_predict_start(trainer, pl_module)
        self._decoded, self._shown = DecodeCount(trainer), 0.0

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, *_: Any, **__: Any
    ) -> None:
        # One bar for all streams: the base class would begin another with each.
        if self.progress is not None and self.predict_progress_bar_id is None:
            self.predict_progress_bar_id = self._add_task(sum(trainer.num_predict_batches), "")
        self._advance_to(trainer, batch, self._shown)

    def on_decode_step(self, trainer: Trainer, batch: Any, done: Callable[[], float]) -> None:
        now = time.monotonic()
        if not self.is_disabled and now - self._values_at > _SECONDS_BETWEEN_VALUES:
            self._values_at = now
            self._advance_to(trainer, batch, done())

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self._decoded.add(trainer, outputs)
        self._advance_to(trainer, batch, self._decoded.batches)

    def _advance_to(self, trainer: Trainer, batch: Any, done: float) -> None:
        """Moves the bar of ``predict`` forward; parts of later batches may be done already."""
        self._shown = max(self._shown, done)
        line = self._decoded.line(trainer, batch, self._shown)
        self._show(self.predict_progress_bar_id, self._shown, line)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_predict_end(trainer, pl_module)
        self._stop_progress()  # so that tables come below it


class DecodeCount:
    """What ``predict`` has decoded so far; the other processes are taken to have done as much."""

    def __init__(self, trainer: Trainer) -> None:
        loaders: Any = trainer.predict_dataloaders
        sets = [loader.dataset for loader in loaders]
        self.num_prompts = sum(len(x.stream.examples) for x in sets if isinstance(x, StreamCalls))
        self.batches = self._ended = self._tokens = 0
        self._began = (time.monotonic(), 0.0)

    def add(self, trainer: Trainer, outputs: Any) -> None:
        self.batches += 1
        if isinstance(outputs, DecodedBatch):
            self._ended += len(outputs.examples) * trainer.world_size
            self._tokens += sum(outputs.num_tokens) * trainer.world_size

    def line(self, trainer: Trainer, batch: Any, done: float) -> str:
        """Describes the run when ``done`` of its batches are; tokens are those of ended texts."""
        share = done / max(sum(trainer.num_predict_batches), 1)
        ended = min(self._ended, self.num_prompts)
        text = f"{ended:,} of {self.num_prompts:,} prompts ({100 * share:.0f} %)"
        if self._tokens:
            speed = self._tokens / max(time.monotonic() - self._began[0], 1e-9)
            text += f", {speed:,.{1 if speed < 10 else 0}f} tokens/s"
        return f"{text}{_time_left(self._began, share)}: {describe_stream(batch)}"


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
                save_figure(curves_figure(curves), path)
                logger.info("Curves: %s", path)


def describe_stream(batch: Any) -> str:
    """Returns task and method of a batch of ``predict``."""
    is_ours = isinstance(batch, PromptStream)
    return f"{batch.examples[0].task} · {batch.method}" if is_ours else "Predicting"


def describe_fit(trainer: Trainer, num_batches: int, began: tuple[float, float]) -> str:
    """Returns the progress and the remaining time of ``fit``, ``num_batches`` into an epoch.

    ``began``: when this run began, and the share done then.
    """
    text = f"Epoch {trainer.current_epoch + 1}"
    if (trainer.max_epochs or -1) > 0:
        text += f" of {trainer.max_epochs}"
    text += f", step {trainer.global_step}"
    if trainer.max_steps > 0:
        text += f" of {trainer.max_steps}"
    return text + _time_left(began, _share_done(trainer, num_batches))


def _time_left(began: tuple[float, float], share: float) -> str:
    since = share - began[1]
    if since <= 0 or share >= 1:
        return ""
    seconds = (time.monotonic() - began[0]) * (1 - share) / since
    return f", {timedelta(seconds=round(seconds))} left"


def _beginning(trainer: Trainer) -> tuple[float, float]:
    """Returns the time, and the share of ``fit`` that a former run has done."""
    # A resumed run is as far as its checkpoint: time that another run spent says nothing about this
    # one's speed.
    batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return time.monotonic(), _share_done(trainer, batches)


def _share_done(trainer: Trainer, num_batches: int) -> float:
    """Share of ``fit`` that is done: by epochs or by steps, whichever ends it first."""
    shares = [0.0]
    if trainer.max_epochs is not None and trainer.max_epochs > 0:
        share = min(num_batches / max(trainer.num_training_batches, 1), 1.0)
        shares.append((trainer.current_epoch + share) / trainer.max_epochs)
    if trainer.max_steps > 0:
        shares.append(trainer.global_step / trainer.max_steps)
    return max(shares)
