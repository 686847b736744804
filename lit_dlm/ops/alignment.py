"""The right shift: which raw output row speaks of which token.

Dream-like models inherit next-token prediction from an autoregressive parent: their raw row
``i - 1`` predicts token ``i``. Everything outside the backbones sees aligned rows only.
"""

from __future__ import annotations

import torch
from torch import Tensor


def aligned(rows: Tensor, shift: int) -> Tensor:
    """Moves raw rows so that row ``i`` speaks of token ``i``.

    Args:
        rows: ``(B, L, ...)`` raw outputs of any dtype.
        shift: 0 leaves them; 1 gives row ``i`` the raw row ``max(i - 1, 0)``.

    Returns:
        ``(B, L, ...)``; position 0 has no predictor under a shift and keeps its own raw row.
    """
    if shift == 0:
        return rows
    return torch.cat([rows[:, :1], rows[:, :-1]], dim=1)


def gather_aligned(rows: Tensor, columns: Tensor, shift: int) -> Tensor:
    """Picks the raw rows that speak of the given canvas columns, which may differ between rows.

    Args:
        rows: ``(B, L, D)`` raw outputs.
        columns: ``(B, K)`` int64 canvas columns.
        shift: 0 or 1, see :func:`aligned`.

    Returns:
        ``(B, K, D)``, equal to ``aligned(rows, shift)`` read at ``columns``.
    """
    source = (columns - shift).clamp_min(0)  # (B, K)
    return rows.gather(1, source.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))
