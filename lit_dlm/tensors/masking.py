"""Which position sees which under block attention, and which was decoded out of order."""

from __future__ import annotations

import torch
from torch import Tensor


def block_numbers(
    length_or_pad_mask: int | Tensor,
    block_size: int,
    *,
    origin: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """``(1, L)`` or ``(B, L)`` int64: the block number of every column, negative before block 0.

    Takes ``L``, or a ``(B, L)`` bool mask of real tokens. Block 0 starts at column ``origin`` of
    every row, or at each row's first real token.
    """
    if isinstance(length_or_pad_mask, Tensor):
        length, device = length_or_pad_mask.shape[1], length_or_pad_mask.device
    else:
        length = length_or_pad_mask
    columns = torch.arange(length, device=device)[None]  # (1, L)
    if origin is not None:
        columns = columns - origin
    elif isinstance(length_or_pad_mask, Tensor):
        columns = columns - length_or_pad_mask.bool().long().argmax(dim=1, keepdim=True)
    return torch.div(columns, block_size, rounding_mode="floor")


def block_causal_visibility(blocks: Tensor, real: Tensor | None = None) -> Tensor:
    """``(B, 1, L, L)`` bool: queries (third axis) see their own and earlier blocks (SDAR).

    Blocks are ``(B, L)`` or ``(1, L)`` int64; padding, not ``real``, is seen only by itself.
    """
    return hide_padding(blocks[:, None, :, None] >= blocks[:, None, None, :], real)


def hide_padding(visible: Tensor, real: Tensor | None) -> Tensor:
    """Hides padded keys; a query that is left with none sees itself."""
    if real is None:
        return visible
    return with_own_key(visible & real.bool()[:, None, None, :])


def with_own_key(visible: Tensor) -> Tensor:
    """Lets a query of ``(B, 1, L, L)`` that sees nothing see itself.

    Some kernels return NaN for a query without keys, which spreads to other rows in the next layer.
    """
    diagonal = torch.eye(visible.shape[-1], dtype=torch.bool, device=visible.device)
    return visible | (diagonal & ~visible.any(dim=-1, keepdim=True))


def non_ltr_positions(steps: Tensor) -> Tensor:
    """``(..., L)`` bool: positions written before one to their left, from ``(..., L)`` steps.

    The release's data contain a list made by an unpublished script; this is our reading of its
    name.
    """
    return (steps >= 0) & (steps.cummax(dim=-1).values > steps)
