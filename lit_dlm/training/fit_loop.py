"""Lightning's fit loop: the one file that changes its counters and its callbacks' switches.

Lightning has no hooks for resuming in the middle of an update or of an RL step, so the progress in
a checkpoint or in the trainer is set back to a point from which training goes on exactly.
"""

from __future__ import annotations

import logging
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint

from lit_dlm.system.options import refuse

logger = logging.getLogger(__name__)

_DEFAULT_SANITY_STEPS = 2  # Lightning's own number of validation batches before training


def set_accumulation(
    trainer: Trainer, rows_per_update: int | None, *, batch_size: int, packing: int = 1
) -> None:
    """Sets ``accumulate_grad_batches`` so that an update has a given number of rows, and logs it.

    A batch of one process has ``batch_size`` items of ``packing`` rows each.
    """
    together = batch_size * packing * trainer.world_size
    if rows_per_update is not None:
        wanted, rest = divmod(rows_per_update, together)
        if wanted < 1 or rest:
            product = f"{batch_size} x {packing} x {trainer.world_size}"
            multiple = f"a multiple of batch_size x packing x processes = {product}"
            refuse("rows_per_update", multiple, rows_per_update)
        # A data module is set up for every stage, so a second look finds what the first one set.
        if trainer.accumulate_grad_batches not in (1, wanted):
            none = f"none beside rows_per_update {rows_per_update}, which makes it {wanted}"
            refuse("trainer.accumulate_grad_batches", none, trainer.accumulate_grad_batches)
        trainer.accumulate_grad_batches = wanted
    if trainer.is_global_zero:
        message = "one update: %d rows (%d processes x %d batches x %d items x %d rows)"
        sizes = trainer.world_size, trainer.accumulate_grad_batches, batch_size, packing
        logger.info(message, together * trainer.accumulate_grad_batches, *sizes)


def is_over(trainer: Trainer) -> bool:
    """Whether no batch will be trained on; Lightning asks for batches before it sees that."""
    stoppers = trainer.early_stopping_callbacks
    has_stopped = any(one.wait_count >= one.patience for one in stoppers)
    return (has_stopped and trainer.fit_loop._can_stop_early) or trainer.fit_loop.done


def is_followed(trainer: Trainer) -> bool:
    """Whether a validation or the end of the epoch comes before the next batch."""
    loop = trainer.fit_loop.epoch_loop
    every = trainer.val_check_batch
    number = loop.total_batch_idx if trainer.check_val_every_n_epoch is None else loop.batch_idx
    is_checked = bool(every) and every != float("inf") and (number + 1) % int(every or 1) == 0
    return bool(loop.batch_progress.is_last_batch) or is_checked


# -- an RL step is an epoch ------------------------------------------------------------------------


def make_epochs_whole(trainer: Trainer) -> None:
    """Sets options of a run whose epochs are RL steps, where Lightning's defaults do not suit."""
    # Every epoch has its own rollouts.
    trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]
    if trainer.num_sanity_val_steps == _DEFAULT_SANITY_STEPS:
        # A reward curve begins with the policy before training; two batches would say too little.
        trainer.num_sanity_val_steps = float("inf")
    for saver in trainer.checkpoint_callbacks:
        # Lightning would save after validation, within an RL step, which cannot be resumed there.
        if isinstance(saver, ModelCheckpoint) and saver._every_n_epochs:
            _set_true(saver, "_save_on_train_epoch_end")
    for stopper in trainer.early_stopping_callbacks:
        # During validation the scores of the RL step that was just trained are not logged yet, and
        # Lightning would use those of an earlier one.
        if isinstance(stopper, EarlyStopping) and not stopper.monitor.startswith("val/"):
            _set_true(stopper, "_check_on_train_epoch_end")


def _set_true(callback: Callback, name: str) -> None:
    """Sets an option to true, unless it was explicitly set to false, which is an error."""
    if getattr(callback, name) is False:
        option = f"{type(callback).__name__}.{name.strip('_')}"
        refuse(option, "true, since an RL step is a whole only when its epoch ends", "false")
    setattr(callback, name, True)


def has_whole_epochs(trainer: Trainer) -> bool:
    """Whether an epoch is an RL step, which can be resumed only from its beginning."""
    return bool(trainer.reload_dataloaders_every_n_epochs == 1)  # type: ignore[attr-defined]


def restart_epoch(checkpoint: dict[str, Any]) -> None:
    """Sets a checkpoint back to the beginning of its epoch, whose batches will be new ones.

    Otherwise Lightning would skip as many of the new batches as were trained on before.
    """
    loops = checkpoint["loops"]["fit_loop"]
    batches, epochs = loops["epoch_loop.batch_progress"], loops["epoch_progress"]
    for kind, count in batches["current"].items():
        batches["total"][kind] -= count
    batches["current"] = dict.fromkeys(batches["current"], 0)
    for counts in (epochs["total"], epochs["current"]):
        counts["started"] -= 1


# -- no checkpoint holds accumulated gradients -----------------------------------------------------


def drop_half_update(module: LightningModule, checkpoint: dict[str, Any]) -> None:
    """Sets a checkpoint back to its last update, so that later batches are trained on again."""
    trainer = module._trainer
    name = type(getattr(trainer, "datamodule", None)).__qualname__
    if trainer is None or "accumulate_grad_batches" not in checkpoint.get(name, ()):
        return  # an RL step is repeated as a whole
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    if progress["is_last_batch"]:
        return  # a pass ends with an update, whole or not
    for counts in (progress["total"], progress["current"]):
        surplus = counts["ready"] % trainer.accumulate_grad_batches
        for kind in counts:
            counts[kind] -= surplus


def drop_failed_update(trainer: Trainer) -> None:
    """Sets the trainer back to its last update, as if a batch that failed had not begun.

    The batches of the same update that came before it are lost with their gradients.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    lost = progress.current.completed % trainer.accumulate_grad_batches
    for counts in (progress.total, progress.current):
        counts.completed -= lost
        counts.reset_on_restart()
