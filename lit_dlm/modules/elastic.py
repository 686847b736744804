"""What lets a run go on exactly, on any number of processes."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer


def place_in_update(trainer: Trainer, batch_idx: int) -> int:
    """Number of this process's batch among those of its update, all processes counted.

    Args:
        trainer: knows rank, processes and accumulation.
        batch_idx: number of the batch in the pass; passes are whole updates.
    """
    accumulated = batch_idx % trainer.accumulate_grad_batches
    return accumulated * trainer.world_size + trainer.global_rank


def seed_batch(module: LightningModule, seed: int, batch_idx: int) -> None:
    """Makes dropout follow from the optimiser step and the batch's place in it.

    Args:
        module: that trains.
        seed: of the run.
        batch_idx: number of the batch in the pass.
    """
    place = place_in_update(module.trainer, batch_idx)
    torch.manual_seed(mixed_seed(seed, module.global_step, place, 0))


def mixed_seed(*parts: int) -> int:
    """One 63-bit seed from several integers (splitmix64 rounds)."""
    value = 0
    for part in parts:
        value = (value ^ (part & 0xFFFFFFFFFFFFFFFF)) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        value ^= value >> 31
    return value >> 1


def count_anew(module: LightningModule, checkpoint: dict[str, Any]) -> None:
    """Makes the trainer count its batches as it would have, had it trained from the beginning.

    The counts in a checkpoint are of one process. With other processes an update has another number
    of them; and batches behind the last update are trained on again, since their gradients are in
    no checkpoint.

    Args:
        module: that trains.
        checkpoint: as Lightning read it; changed in place.
    """
    trainer = module._trainer
    data = getattr(trainer, "datamodule", None)
    then = checkpoint.get(type(data).__qualname__, {}).get("batches")
    if trainer is None or then is None:
        return
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        moved = counts["ready"] // then * trainer.accumulate_grad_batches - counts["ready"]
        for name in counts:
            counts[name] += moved
