"""Stops a run whose loss or gradients are not finite, before they reach the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

_MOST_NAMED = 16
"""Samples that a message lists."""


class NonFiniteError(ValueError):
    """A loss or gradient is infinite or not a number; raised by all processes at the same step."""


def require_finite(
    is_finite: Tensor, trainer: Trainer | None, *, what: str, blamed: Callable[[], list[str]]
) -> None:
    """Raises in every process when one of them has met a number that is not finite.

    One process alone must not stop, or the others would wait for it forever. Costs one reduction of
    a number, and a look at the result from the host.

    Args:
        is_finite: scalar bool of this process.
        trainer: the run; ``None`` outside of one.
        what: what was checked, for the message.
        blamed: uids of this process's samples that the message shall name, possibly none; called
            on failure only.

    Raises:
        NonFiniteError: naming the samples of all processes.
    """
    world_size = 1 if trainer is None else trainer.world_size
    bad = (~is_finite).float()
    if world_size > 1:
        assert trainer is not None
        bad = trainer.strategy.reduce(bad, reduce_op="sum")
    if not bool(bad):
        return
    named = blamed()
    if world_size > 1:
        gathered: list[list[str]] = [[] for _ in range(world_size)]
        torch.distributed.all_gather_object(gathered, named)
        named = [uid for part in gathered for uid in part]
    step = 0 if trainer is None else trainer.global_step
    listed = ", ".join(named[:_MOST_NAMED])
    if len(named) > _MOST_NAMED:
        listed += f" and {len(named) - _MOST_NAMED} more"
    raise NonFiniteError(
        f"{what} is not finite at optimiser step {step}, samples {listed}; weights are those from "
        "before it. Look at these samples, or lower the learning rate"
    )


def finite_gradients(gradients: Sequence[Tensor]) -> Tensor:
    """Scalar bool: whether all gradients are finite, of sharded ones this process's part.

    Args:
        gradients: at least one, of any shapes.
    """
    local = [value.to_local() if isinstance(value, DTensor) else value for value in gradients]
    sums = torch.stack([value.float().abs().sum() for value in local])
    return torch.isfinite(sums).all()
