"""Checks and seeds of optimiser steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

_MOST_NAMED = 16  # most samples that a message about numbers that are not finite lists


class NonFiniteError(ValueError):
    """A loss or gradient is infinite or not a number; raised by all processes at the same step."""


def require_finite(
    is_finite: Tensor, trainer: Trainer | None, *, what: str, blamed: Callable[[], list[str]]
) -> None:
    """Raises in every process when one of them has met a number that is not finite.

    Costs the reduction of one number, and one wait of the host for the device. On failure
    ``blamed`` returns the uids of this process's samples that the message should name.
    """
    world_size = 1 if trainer is None else trainer.world_size
    bad = (~is_finite).float()
    if world_size > 1:
        assert trainer is not None
        # One process alone must not stop, or the others would wait for it forever.
        bad = trainer.strategy.reduce(bad, reduce_op="sum")
    if not bool(bad):
        return
    named = blamed()
    if world_size > 1:
        gathered: list[list[str]] = [[] for _ in range(world_size)]
        torch.distributed.all_gather_object(gathered, named)
        named = [uid for part in gathered for uid in part]
    listed = f", samples {', '.join(named[:_MOST_NAMED])}" if named else ""
    if len(named) > _MOST_NAMED:
        listed += f" and {len(named) - _MOST_NAMED} more"
    raise NonFiniteError(
        f"{what} is not finite at optimiser step {0 if trainer is None else trainer.global_step}"
        f"{listed}; weights are those from before it. "
        f"{'Look at these samples, or lower' if named else 'Lower'} the learning rate"
    )


def require_finite_gradients(module: LightningModule, uids: Sequence[str] = ()) -> None:
    """Stops all processes before an optimiser step that would make weights not finite.

    Clipping would spread one gradient that is not finite to all weights.
    """
    if getattr(module.trainer.precision_plugin, "scaler", None) is not None:
        return  # float16 precision searches for a loss scale and skips such steps itself
    gradients = [value.grad for value in module.parameters() if value.grad is not None]
    local = [value.to_local() if isinstance(value, DTensor) else value for value in gradients]
    # Sums, so that the host waits for a GPU once and not for each weight.
    sums = torch.stack([value.float().abs().sum() for value in local])
    require_finite(
        torch.isfinite(sums).all(), module.trainer, what="a gradient", blamed=lambda: list(uids)
    )


def place_in_update(trainer: Trainer, batch_idx: int) -> int:
    """Returns the index of this process's batch among those of all processes in its update."""
    # A pass over the data consists of whole updates.
    accumulated = batch_idx % trainer.accumulate_grad_batches
    return accumulated * trainer.world_size + trainer.global_rank


def seed_batch(module: LightningModule, seed: int, batch_idx: int) -> None:
    """Seeds dropout by the optimiser step and the batch's place in it."""
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
