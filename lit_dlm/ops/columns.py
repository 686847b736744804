"""Tensors with one entry per canvas column."""

from __future__ import annotations

import torch
from torch import Tensor


def shifted(values: Tensor, by: int, fill: int = 0) -> Tensor:
    """Values per column with columns added on the left, or taken away where ``by`` is negative.

    Args:
        values: ``(B, L, ...)``.
        by: how many columns.
        fill: value of new columns.

    Returns:
        ``(B, L + by, ...)``, contiguous.
    """
    if by < 0:
        return values[:, -by:].contiguous()
    new = values.new_full((values.shape[0], by, *values.shape[2:]), fill)
    return torch.cat([new, values], dim=1)
