"""Progress of a run: one bar for all of it, or lines in the log where there is no terminal."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, RichProgressBar
from rich import get_console

from lit_dlm.predict.decode import PromptStream

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES = 30.0
_SECONDS_BETWEEN_VALUES = 0.5  # reading values waits for the device
_SHOWN = re.compile(r"(train|rollout|val)/(loss|nelbo|reward|correct|accuracy)")
"""Names of logged values that show how training goes; ``time/reward``, in seconds, does not."""


class TrainingLog(Callback):
    """Reports the progress of a run: values for the bar, and log lines where no bar is drawn.

    Training of fewer steps than ``log_every_n_steps`` is logged at its last step, instead of not at
    all.
    """

    def __init__(self) -> None:
        self._batch_at = self._logged_at = 0.0
        self._began: tuple[float, float] = (0.0, 0.0)  # when, and the share done then
        self._seconds = 0.0
        self._tokens = self._num_done = self._first = 0

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
        if self._is_due(trainer):
            text = describe_fit(trainer, batch_idx + 1, self._began)
            logger.info("%s: %s", text, self._line(trainer))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            spent = timedelta(seconds=round(time.monotonic() - self._began[0]))
            steps = trainer.global_step - self._first
            logger.info("%d steps in %s: %s", steps, spent, self._line(trainer))

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._logged_at = time.monotonic()
        self._began, self._num_done = (self._logged_at, 0.0), 0

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self._num_done += 1
        self.on_decode_step(trainer, batch, lambda: self._num_done)

    def on_decode_step(self, trainer: Trainer, batch: Any, done: Callable[[], float]) -> None:
        """Logs how far decoding is: ``done()`` returns how many of all batches are done."""
        if self._is_due(trainer):
            total = max(sum(trainer.num_predict_batches), 1)
            share = done() / total
            left = _time_left(self._began, share)
            message = "%s, %.1f %% of %d batches%s"
            logger.info(message, describe_stream(batch), 100.0 * share, total, left)

    def _is_due(self, trainer: Trainer) -> bool:
        now = time.monotonic()
        if not trainer.is_global_zero or now - self._logged_at < _SECONDS_BETWEEN_LINES:
            return False
        self._logged_at = now
        # A line beside a bar would tear it.
        bars = [one for one in trainer.callbacks if isinstance(one, ProgressBar)]  # type: ignore[attr-defined]
        return all(bar.is_disabled for bar in bars)

    def _line(self, trainer: Trainer) -> str:
        values = self.values(trainer)
        return ", ".join(f"{name} {value}" for name, value in values.items()) or "nothing logged"

    def values(self, trainer: Trainer) -> dict[str, str]:
        """Returns the last logged loss, reward and accuracy, the learning rate, and tokens/s.

        Tokens are those of the training batches of all processes, prompts and padding included,
        divided by the time that their steps took.
        """
        values = {}
        for name, value in trainer.callback_metrics.items():
            if shown := _SHOWN.fullmatch(name):
                stage, last = shown.groups()
                # One name for each kind of value, whichever method logged it.
                last = {"correct": "accuracy", "nelbo": "loss"}.get(last, last)
                values[f"val {last}" if stage == "val" else last] = f"{float(value):.4g}"
        if trainer.optimizers:
            values["lr"] = f"{trainer.optimizers[0].param_groups[0]['lr']:.3g}"
        if self._tokens and self._seconds:
            values["tokens/s"] = f"{self._tokens / self._seconds:,.0f}"
        return values


class ProgressBar(RichProgressBar):
    """Rich progress bar for the whole run; nothing is drawn where there is no terminal.

    Lightning starts a new bar for each loader of ``predict``, whose remaining time is that of one
    method only.
    """

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, str] = {}
        self._values_at = 0.0
        self._began = (0.0, 0.0)  # when training began, and the share done then
        self._num_done, self._shown = 0, 0.0
        console = get_console()
        if not (console.is_terminal or console.is_jupyter):
            self.disable()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._began = _beginning(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        bar = self.train_progress_bar_id
        if not self.is_disabled and self.progress is not None and bar is not None:
            text = describe_fit(trainer, batch_idx + 1, self._began)
            self.progress.update(bar, description=text)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def _get_train_description(self, current_epoch: int) -> str:
        return describe_fit(self.trainer, 0, self._began)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        items = super().get_metrics(trainer, pl_module)
        items.pop("v_num", None)  # the logger's version, which rich would show as a number
        for one in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(one, TrainingLog) and trainer.training:
                now = time.monotonic()
                if not self._values or now - self._values_at > _SECONDS_BETWEEN_VALUES:
                    self._values, self._values_at = one.values(trainer), now
                items = {k: v for k, v in items.items() if "/" not in k} | self._values
        return items

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_predict_start(trainer, pl_module)
        self._num_done, self._shown = 0, 0.0

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, *_: Any, **__: Any
    ) -> None:
        if self.is_disabled or self.progress is None:
            return
        # One bar for all streams: the base class would begin another with each.
        if self.predict_progress_bar_id is None:
            total = sum(trainer.num_predict_batches)
            self.predict_progress_bar_id = self._add_task(total, describe_stream(batch))
        self.progress.update(self.predict_progress_bar_id, description=describe_stream(batch))
        self.refresh()

    def on_decode_step(self, trainer: Trainer, batch: Any, done: Callable[[], float]) -> None:
        now = time.monotonic()
        if not self.is_disabled and now - self._values_at > _SECONDS_BETWEEN_VALUES:
            self._values_at = now
            self._advance_to(done())

    def on_predict_batch_end(self, *_: Any, **__: Any) -> None:
        self._num_done += 1
        self._advance_to(self._num_done)

    def _advance_to(self, done: float) -> None:
        """Moves the bar of ``predict`` forward; parts of later batches may be done already."""
        bar = self.predict_progress_bar_id
        if self.progress is not None and bar is not None:
            self._shown = max(self._shown, done)
            self.progress.update(bar, completed=self._shown)
            self.refresh()

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_predict_end(trainer, pl_module)
        self._stop_progress()  # so that tables come below it


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
