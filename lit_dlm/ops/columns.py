"""Tensors with one entry per canvas column."""

from __future__ import annotations

import torch
from torch import Tensor


def shifted(values: Tensor, by: int, fill: int = 0, *, dim: int = 1) -> Tensor:
    """Values per column with columns added on the left, or taken away where ``by`` is negative.

    Args:
        values: of any shape.
        by: how many columns.
        fill: value of new columns.
        dim: the axis of the columns.
    """
    if by < 0:
        return values.narrow(dim, -by, values.shape[dim] + by)
    shape = [*values.shape]
    shape[dim] = by
    return torch.cat([values.new_full(shape, fill), values], dim)
