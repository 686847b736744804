"""Saves what fine-tuning or RL learns in folders that decoding loads: per epoch, best and last."""

from __future__ import annotations

import logging
import math
import shutil
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lit_dlm.callbacks.discrimination import SCORE, DiscriminationScore
from lit_dlm.finetuning.trainable import TrainableModule
from lit_dlm.system.files import write_json
from lit_dlm.system.options import at_least, of_kind, refuse
from lit_dlm.training.steps import NonFiniteError

_UNFINISHED = ".unfinished"  # file that exists in the folder while a run writes there

logger = logging.getLogger(__name__)


class AdapterCheckpoint(Callback):
    """Writes the adapter (or the model, where all of it is trained) at the end of epochs.

    ``epoch-00`` and so on, ``last`` and, with a monitor, ``best`` are folders that
    ``backbone.adapter`` (or ``backbone.path``) loads; ``scores.json`` lists the monitored values.
    A run that stops because a loss is not finite leaves the weights from before it in ``last``.
    To resume training use Lightning's ``ModelCheckpoint``, which saves the optimiser as well.

    An epoch in which the monitored value was not logged gets its folder but no score. A new run
    requires a folder without weights, except those of a run that was cut short before its first
    checkpoint, which it replaces.

    Args:
        folder: where the folders go.
        every_n_epochs: epochs between two folders; ``last`` is written then, and at the end.
        keep_epochs: whether to keep a folder per epoch.
        monitor: logged value that picks ``best``, such as ``val/loss``.
        mode: whether a smaller or a larger value is better.
    """

    writes_files = True

    def __init__(
        self,
        folder: str,
        *,
        every_n_epochs: int = 1,
        keep_epochs: bool = True,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        at_least(1, every_n_epochs=every_n_epochs)
        self.folder = Path(folder)
        self.every_n_epochs = every_n_epochs
        self.keep_epochs = keep_epochs
        self.monitor = monitor
        self._needs_validation = (monitor or "").startswith("val/")
        self.mode = mode
        self.scores: dict[str, float] = {}
        self._epochs_ended: int | None = None
        self._former: Tensor | None = None  # the monitored value when the epoch began
        self._was_validated = False  # in this epoch
        self._measured: float | None = None  # in this epoch's last validation

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            of_kind(pl_module, TrainableModule, option="model")

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        is_due = trainer.max_epochs is None or not 0 <= trainer.max_epochs < self.every_n_epochs
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        has_score = any(isinstance(one, DiscriminationScore) for one in callbacks)
        is_due = is_due and self._needs_validation and not (has_score and self.monitor == SCORE)
        if is_due and not _will_validate(trainer):
            refuse(
                "AdapterCheckpoint.monitor",
                f"a run with validation, which logs {self.monitor!r}",
                "one without",
                "; see data.val_fraction and trainer.check_val_every_n_epoch, or leave monitor out",
            )
        replaced = self._replaced(trainer)
        trainer.strategy.barrier("adapters_looked_at")  # before the first process deletes some
        if trainer.is_global_zero:
            for path in replaced:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            self.folder.mkdir(parents=True, exist_ok=True)
            # Tells a run that was cut short, whose weights are of no use, from one that has ended.
            (self.folder / _UNFINISHED).touch()
        # If the checkpoint was taken right after an epoch's last batch, that epoch counts as over
        # and gets its folder here. It is not validated any more, so it has no score.
        number = trainer.current_epoch
        if self._epochs_ended is not None and self._epochs_ended < number:
            self._write(trainer, pl_module, number - 1, has_score=False)
        self._epochs_ended = number

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        # Lightning keeps a value until it is logged again.
        self._former = trainer.callback_metrics.get(self.monitor or "")
        self._was_validated, self._measured = False, None

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._was_validated = not trainer.sanity_checking
        value = trainer.callback_metrics.get(self.monitor or "")
        self._measured = None if value is None else float(value)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._epochs_ended = trainer.current_epoch + 1
        self._write(trainer, pl_module, trainer.current_epoch, has_score=self.monitor is not None)

    def _write(self, trainer: Trainer, pl_module: Any, number: int, *, has_score: bool) -> None:
        if (number + 1) % self.every_n_epochs:
            return
        # All processes take part, since sharded weights are gathered; the first one writes.
        pl_module.export(self.folder / "last")
        is_best = has_score and self._is_best(trainer, number)
        if trainer.is_global_zero:
            if self.keep_epochs:
                _replace(self.folder / "last", self.folder / f"epoch-{number:02d}")
            if is_best:
                _replace(self.folder / "last", self.folder / "best")
            if self.scores:
                scores = {"monitor": self.monitor, "scores": self.scores}
                write_json(self.folder / "scores.json", scores)
        trainer.strategy.barrier("adapters")

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        # The last epochs, where their number is no multiple: `last` is what training ended with.
        if (self._epochs_ended or 0) % self.every_n_epochs:
            pl_module.export(self.folder / "last")
        if trainer.is_global_zero:
            (self.folder / _UNFINISHED).unlink(missing_ok=True)
            if self.monitor is not None and not self.scores:
                logger.warning("monitor: %r was not logged, so there is no best", self.monitor)
            logger.info("weights of epochs, best and last: %s", self.folder)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        # After other errors not every process may be here, and sharded weights need all of them.
        if isinstance(exception, NonFiniteError):
            pl_module.export(self.folder / "last")
            logger.warning("weights before the error: %s", self.folder / "last")

    def _replaced(self, trainer: Trainer) -> list[Path]:
        """Returns what a new run deletes in the folder."""
        if trainer.ckpt_path is not None or trainer.global_step > 0:
            return []
        names = ("epoch-*", "best", "last", "scores.json")
        former = sorted(path for name in names for path in self.folder.glob(name))
        if former:
            listed = ", ".join(path.name for path in former)
            # Without checkpoints a run that was cut short cannot go on: the command replaces it.
            is_finished = not (self.folder / _UNFINISHED).exists()
            require_no_former_run(trainer, self.folder, "weights", listed, is_finished=is_finished)
        return former

    def _is_best(self, trainer: Trainer, number: int) -> bool:
        """Notes the monitored value if this epoch logged it; returns whether it is the best."""
        found = trainer.callback_metrics.get(self.monitor or "", self._measured)
        if found is None and (self._was_validated or not self._needs_validation):
            raise ValueError(
                f"monitor: nothing was logged as {self.monitor!r}, known: "
                f"{', '.join(sorted(trainer.callback_metrics)) or 'nothing'}"
            )
        # The same tensor object as before the epoch: nothing was logged in it.
        if found is None or found is self._former:
            return False
        value = float(found)
        sign = 1.0 if self.mode == "min" else -1.0
        # A score that is not finite is kept in the list but never the one to beat.
        former = [sign * score for score in self.scores.values() if math.isfinite(score)]
        self.scores[f"epoch-{number:02d}"] = value
        is_best = math.isfinite(value) and sign * value < min(former, default=math.inf)
        if is_best and trainer.is_global_zero:
            logger.info("best so far: epoch %d, %s = %.4f", number, self.monitor, value)
        return is_best

    def state_dict(self) -> dict[str, Any]:
        return {
            "scores": dict(self.scores),
            "epochs_ended": self._epochs_ended,
            "measured": self._measured,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scores = dict(state_dict["scores"])
        self._epochs_ended = state_dict["epochs_ended"]
        self._measured = state_dict["measured"]


def require_no_former_run(
    trainer: Trainer, folder: Path, what: str, found: object, *, is_finished: bool
) -> None:
    """Refuses a new run over the files of a former one that was finished or can be resumed."""
    savers = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
    folders = [trainer.default_root_dir, *(one.dirpath for one in savers if one.dirpath)]
    if is_finished or any(any(Path(one).rglob("*.ckpt")) for one in folders):
        refuse(
            str(folder),
            f"a folder without {what}, since this run begins anew",
            f"{found} of a former one",
            "; resume that one with --ckpt_path last, choose another run_dir, or delete the folder",
        )


def _will_validate(trainer: Trainer) -> bool:
    """Whether a run that begins has something to validate on, and an epoch that validates."""
    epochs, every = trainer.max_epochs, trainer.check_val_every_n_epoch
    if every is not None and epochs is not None and 0 <= epochs < every:
        return False
    # The data are not loaded yet where the first epoch is not validated.
    is_empty = trainer.val_dataloaders is not None and not sum(trainer.num_val_batches)
    return trainer.enable_validation and not is_empty


def _replace(source: Path, target: Path) -> None:
    # Copied beside the target and renamed, so that a reader or a kill never meets half a folder.
    draft = target.with_name(f".{target.name}-partial")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(source, draft)
    shutil.rmtree(target, ignore_errors=True)
    draft.rename(target)
