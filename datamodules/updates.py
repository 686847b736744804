"""How many batches make one optimiser step, for any number of processes."""

from __future__ import annotations

import logging

from lightning.pytorch import Trainer

logger = logging.getLogger(__name__)


def set_accumulation(
    trainer: Trainer, rows_per_update: int | None, *, batch_size: int, packing: int = 1
) -> None:
    """Sets ``accumulate_grad_batches`` so that an update has a given number of rows, and says so.

    Args:
        trainer: knows the number of processes.
        rows_per_update: rows of one optimiser step over all processes; ``None`` leaves the
            trainer's own setting.
        batch_size: items of a batch of one process.
        packing: rows in each item.

    Raises:
        ValueError: the rows cannot be dealt in whole batches, or the trainer has a setting of its
            own that says otherwise.
    """
    together = batch_size * packing * trainer.world_size
    if rows_per_update is not None:
        if rows_per_update < 1 or rows_per_update % together:
            raise ValueError(
                f"rows_per_update: expected a multiple of batch_size x packing x processes = "
                f"{batch_size} x {packing} x {trainer.world_size}, got {rows_per_update}"
            )
        wanted = rows_per_update // together
        if trainer.accumulate_grad_batches not in (1, wanted):
            raise ValueError(
                f"trainer.accumulate_grad_batches: expected none beside rows_per_update "
                f"{rows_per_update}, which makes it {wanted}, got {trainer.accumulate_grad_batches}"
            )
        trainer.accumulate_grad_batches = wanted
    if trainer.is_global_zero:
        logger.info(
            "one update: %d rows (%d processes x %d batches x %d items x %d rows)",
            together * trainer.accumulate_grad_batches,
            trainer.world_size,
            trainer.accumulate_grad_batches,
            batch_size,
            packing,
        )
