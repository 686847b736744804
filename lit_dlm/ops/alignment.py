"""Undoes the right shift: row ``i`` predicts token ``i``.

Dream-like models inherit next-token prediction from an autoregressive parent: their raw row
``i - 1`` predicts token ``i`` (Dream, arXiv:2508.15487, section on the shift operation). Everything
outside the backbones sees aligned rows only.
"""

from __future__ import annotations

import torch
from torch import Tensor


def first_real_columns(pad_mask: Tensor) -> Tensor:
    """``(B,)`` int64: column of each row's first real token in a ``(B, L)`` mask, 0 without one."""
    return pad_mask.bool().long().argmax(dim=1)


def aligned(rows: Tensor, shift: int, *, starts: Tensor | None = None) -> Tensor:
    """``(B, L, ...)``: raw rows moved so that row ``i`` predicts token ``i``.

    The first real token has no predictor under a shift; it keeps its own raw row. Left padding must
    not change that: otherwise it would receive the row of a padding token.

    Args:
        shift: 0 leaves them; 1 gives row ``i`` the raw row ``i - 1``.
        starts: ``(B,)`` int64 column of each row's first real token; ``None`` means 0.
    """
    if shift == 0:
        return rows
    moved = torch.cat([rows[:, :1], rows[:, :-1]], dim=1)
    if starts is None:
        return moved
    is_first = torch.arange(rows.shape[1], device=rows.device) == starts.unsqueeze(1)  # (B, L)
    return torch.where(is_first.reshape(*is_first.shape, *[1] * (rows.ndim - 2)), rows, moved)


def raw_columns(columns: Tensor, shift: int, *, starts: Tensor | None = None) -> Tensor:
    """The ``(B, K)`` columns whose raw rows predict ``(B, K)`` int64 canvas columns.

    ``aligned(rows, shift, starts=starts)`` at ``columns`` is ``rows`` there.
    """
    if shift == 0:
        return columns
    source = (columns - shift).clamp_min(0)
    if starts is not None:
        source = torch.where(columns == starts.unsqueeze(1), columns, source)
    return source


def gather_rows(rows: Tensor, columns: Tensor) -> Tensor:
    """``(B, K, D)``: the rows ``(B, L, D)`` at ``(B, K)`` int64 columns."""
    return rows.gather(1, columns.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))


def shifted(values: Tensor, by: int, fill: int = 0) -> Tensor:
    """``(B, L + by, ...)``: columns of ``fill`` added on the left, or taken away where negative."""
    if by < 0:
        return values[:, -by:].contiguous()
    new = values.new_full((values.shape[0], by, *values.shape[2:]), fill)
    return torch.cat([new, values], dim=1)
