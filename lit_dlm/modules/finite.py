"""Precisions that a run may have, and numbers that are not finite, at which it stops.

All processes stop at once, before weights change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

_MOST_NAMED = 16
"""Samples that a message about numbers that are not finite lists."""


class NonFiniteError(ValueError):
    """A loss or gradient is infinite or not a number; raised by all processes at the same step."""


def require_finite(
    is_finite: Tensor, trainer: Trainer | None, *, what: str, blamed: Callable[[], list[str]]
) -> None:
    """Raises in every process when one of them has met a number that is not finite.

    Costs one reduction of a number, and a look at the result from the host.

    Args:
        is_finite: scalar bool of this process.
        blamed: uids of this process's samples that the message shall name, possibly none; called
            on failure only.
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

    Args:
        uids: samples of the step, where they are known.
    """
    if getattr(module.trainer.precision_plugin, "scaler", None) is not None:
        return  # float16 precision tries its loss scale out and skips such steps itself
    gradients = [value.grad for value in module.parameters() if value.grad is not None]
    local = [value.to_local() if isinstance(value, DTensor) else value for value in gradients]
    # Sums, so that a GPU is waited for once and not for each weight.
    sums = torch.stack([value.float().abs().sum() for value in local])
    require_finite(
        torch.isfinite(sums).all(), module.trainer, what="a gradient", blamed=lambda: list(uids)
    )


def check_precision(trainer: Trainer) -> None:
    """Refuses "true" precisions other than 32 bits.

    They set torch's default dtype and cast every module: heads and their optimisers would be
    rounded along with the decoder, whose dtype is a setting of its own.
    """
    precision = str(trainer.precision)
    if precision.endswith("-true") and precision != "32-true":
        raise ValueError(
            f"trainer.precision: expected 32-true, bf16-mixed or 16-mixed, got {precision}; "
            "decoders have a dtype of their own (backbone: dtype: bfloat16)"
        )
