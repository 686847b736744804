"""Ends a run where nothing is lost: on SIGTERM, Ctrl-C, SLURM's warning, or out of memory."""

from __future__ import annotations

import ctypes
import errno
import logging
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment

from lit_dlm.config.saved import LAST
from lit_dlm.training.fit_loop import drop_failed_update, has_whole_epochs, is_followed

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

_PATIENCE = 3.0  # seconds after which a second signal ends the run at once
_PR_SET_PDEATHSIG = 1


class Interrupted(SystemExit):
    """The run was asked to end; its exit status is 128 plus the number of the signal."""


class Interruption(Callback):
    """Finishes the current step, saves what training needs to resume, and exits.

    Training saves ``last.ckpt`` after the current optimiser step, or after the next one where a
    validation or the end of an epoch comes in between. Nothing is saved within an RL step if the
    last checkpoint is from its beginning, since it is repeated exactly from there. Decoding keeps
    the responses that have ended, in complete shards and results; the others are made again.
    Several processes agree on the step, and a second signal ends the run at once.

    Training also ends if its folder has been deleted, since what it saves would be incomplete.

    An out-of-memory error of a GPU gets a note that names the option to lower. Training in one
    process, except RL, is then saved as it was after its last step.
    """

    def __init__(self, lock: Path | None = None) -> None:
        self._lock = lock  # file in the folder of the run that exists while the run does
        self._number = 0
        self._since = 0.0
        self._trainer: Trainer
        self._former: dict[int, Any] = {}
        self._step = 0  # of the optimiser, when the last batch ended
        self._began = 0  # the same when the epoch began
        self._saved = 0  # the same where ``--ckpt_path last`` begins; -1 if that is not known
        self._is_stepping = False  # weights may be between two steps

    # -- signals ---------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._trainer = trainer
        # Processes that Lightning launched wait for the first one in collectives, so they must end
        # with it even if it is killed.
        if _is_launched(trainer):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def _install(self, trainer: Trainer) -> None:
        """Installs the signal handler, after Lightning has installed its own."""
        # Lightning's exits with status 0, without a checkpoint, and waits in it for the others.
        if signal.getsignal(signal.SIGTERM) == self._on_signal or (
            threading.current_thread() is not threading.main_thread()
        ):
            return
        # Lightning's own handler may have seen one before this was installed.
        if trainer.received_sigterm:
            self._number = signal.SIGTERM
        for number in SIGNALS:
            self._former.setdefault(number, signal.getsignal(number))
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._number:
            if time.monotonic() - self._since > _PATIENCE:
                raise Interrupted(128 + number)
            return
        # Only a note: the handler may run in the middle of an optimiser step.
        self._number, self._since = number, time.monotonic()
        launcher = self._trainer.strategy.launcher
        if launcher is not None:
            launcher.kill(signal.Signals(number))
        if self._trainer.is_global_zero:
            logger.warning("%s: ending after the step at hand", signal.Signals(number).name)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._restore()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._restore()
        if isinstance(exception, torch.OutOfMemoryError):
            exception.add_note(_advice(trainer, exception))
            if trainer.state.fn == "fit":
                exception.add_note(self._where_to_resume(trainer))

    def _where_to_resume(self, trainer: Trainer) -> str:
        """Saves the last step where that is exact; returns from which step the run resumes."""
        path = _last(trainer)
        self._note_saved(trainer)
        is_between = trainer.training and not self._is_stepping and not has_whole_epochs(trainer)
        if is_between and path is not None and trainer.world_size == 1:
            drop_failed_update(trainer)
            if self._saved != trainer.global_step:
                trainer.save_checkpoint(path, False)
                self._saved = trainer.global_step
        return f"--ckpt_path last goes on from optimiser step {max(self._saved, 0)}"

    def _restore(self) -> None:
        for number, handler in self._former.items():
            # Otherwise Lightning has restored it already.
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)
        self._former = {}

    # -- where a run may end ---------------------------------------------------------------------

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._install(trainer)

    on_validation_start = on_predict_start = on_sanity_check_start

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._install(trainer)
        self._step = trainer.global_step
        is_last = Path(trainer.ckpt_path or "").name.startswith(LAST)
        self._saved = self._step if is_last or self._step == 0 else -1
        # A run that had stopped early is not continued.
        stoppers = trainer.early_stopping_callbacks
        trainer.should_stop |= any(one.wait_count >= one.patience for one in stoppers)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = trainer.global_step
        # An epoch of one step has no other place to end.
        if trainer.strategy.reduce_boolean_decision(bool(self._number), all=False):
            self._note_saved(trainer)
            if self._saved == self._began or not has_whole_epochs(trainer):
                self._end_training(trainer, is_repeated=False)

    def _note_saved(self, trainer: Trainer) -> None:
        """Other checkpoints do not count: the command that is named does not find them."""
        for saver in trainer.checkpoint_callbacks:
            if isinstance(saver, ModelCheckpoint):
                name = Path(saver._last_checkpoint_saved).name
                if name.startswith(LAST):
                    self._saved = max(self._saved, saver._last_global_step_saved)

    def on_before_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._is_stepping = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._is_stepping = False
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and (batch_idx + 1) % every == 0:
            self._require_folder()
        has_stepped, self._step = trainer.global_step != self._step, trainer.global_step
        # A checkpoint holds neither accumulated gradients nor a validation that is due.
        if not has_stepped or is_followed(trainer):
            return
        # The signal may have reached one process alone; all must leave the loop at the same step.
        if trainer.strategy.reduce_boolean_decision(bool(self._number), all=False):
            self._note_saved(trainer)
            is_repeated = has_whole_epochs(trainer) and self._saved == self._began
            self._end_training(trainer, is_repeated=is_repeated)

    def on_rollout_progress(self) -> None:
        """Ends a run during rollouts, which are repeated; several processes train a step first."""
        trainer = self._trainer
        if trainer.world_size == 1:
            self._install(trainer)
            if self._number:
                self._note_saved(trainer)
                self._end_training(trainer, is_repeated=False)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._require_folder()

    def _require_folder(self) -> None:
        if self._lock is not None and not self._lock.exists():
            raise FileNotFoundError(errno.ENOENT, "deleted during the run", str(self._lock.parent))

    def on_validation_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        # Within training, the run ends after the next optimiser step instead.
        is_outside = trainer.sanity_checking or trainer.state.fn != "fit"
        if self._number and trainer.world_size == 1 and is_outside:
            raise self._interrupted(trainer)

    def on_decode_step(self, trainer: Trainer, batch: Any, done: Callable[[], float]) -> bool:
        """Returns whether to end the decode; responses that have ended then make up a batch."""
        return bool(self._number)

    def on_predict_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if self._number:
            if trainer.is_global_zero:
                logger.warning("ended; the same command decodes what is left")
            raise self._interrupted(trainer)

    on_predict_end = on_predict_batch_end  # where no response has ended, no batch does

    def _end_training(self, trainer: Trainer, *, is_repeated: bool) -> None:
        way_on = "go on with the same command and --ckpt_path last"
        step = trainer.global_step
        path = _last(trainer)
        if self._saved == step or is_repeated:
            message = f"ended at optimiser step {step}; {way_on}, from step {self._saved}"
        elif path is None:
            message = f"ended at optimiser step {step}; nothing is saved without a ModelCheckpoint"
        else:
            trainer.save_checkpoint(path, False)  # not only weights
            message = f"ended at optimiser step {step}, saved as {path}; {way_on}"
        if trainer.is_global_zero:
            logger.warning(message)
        raise self._interrupted(trainer)

    def _interrupted(self, trainer: Trainer) -> Interrupted:
        # The first process collects the status of those it launched; any but 0 counts as a crash.
        number = self._number or signal.SIGTERM
        return Interrupted(0 if _is_launched(trainer) else 128 + number)


def _is_launched(trainer: Trainer) -> bool:
    """Whether this process was launched by Lightning in the first process."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    return isinstance(environment, LightningEnvironment) and trainer.local_rank > 0


def _advice(trainer: Trainer, error: BaseException) -> str:
    """Returns what ran out of memory, and which option to lower."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    data = trainer.datamodule  # type: ignore[attr-defined]
    is_rl = hasattr(data, "rollout_batch_size")
    if any("/lit_dlm/decoding/" in file for file in files):
        return f"in decoding; lower data.{'rollout_batch_size' if is_rl else 'batch_size'}"
    if trainer.state.fn != "fit" or trainer.validating:
        size = "val_batch_size" if hasattr(data, "val_batch_size") else "batch_size"
        return f"in a validation; lower data.{size}"
    rest = "" if is_rl else " in a new run, or set gradient_checkpointing of the backbone and go on"
    return f"in training; lower data.batch_size{rest}"


def _last(trainer: Trainer) -> Path | None:
    """Returns where ``--ckpt_path last`` looks first."""
    for saver in trainer.checkpoint_callbacks:
        if isinstance(saver, ModelCheckpoint) and saver.dirpath and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            return Path(saver.dirpath) / f"{LAST}.ckpt"
    return None
