"""What lets a training run go on exactly where it was stopped."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer


def place_in_update(trainer: Trainer, batch_idx: int) -> int:
    """Number of this process's batch among those of its update, all processes counted."""
    # A pass is whole updates.
    accumulated = batch_idx % trainer.accumulate_grad_batches
    return accumulated * trainer.world_size + trainer.global_rank


def seed_batch(module: LightningModule, seed: int, batch_idx: int) -> None:
    """Makes dropout follow from the optimiser step and the batch's place in it."""
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


def drop_half_update(module: LightningModule, checkpoint: dict[str, Any]) -> None:
    """Trains again on batches behind the last update: their gradients are in no checkpoint."""
    trainer = module._trainer
    name = type(getattr(trainer, "datamodule", None)).__qualname__
    if trainer is None or "accumulate_grad_batches" not in checkpoint.get(name, ()):
        return  # an RL step is done again as a whole
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        surplus = counts["ready"] % trainer.accumulate_grad_batches
        for kind in counts:
            counts[kind] -= surplus
