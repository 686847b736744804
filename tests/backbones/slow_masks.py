"""Attention masks from a rule, one entry at a time."""

from collections.abc import Callable

import torch
from torch import Tensor


def slow(rule: Callable[[int, int, int], bool], batch: int, length: int) -> Tensor:
    """``(B, 1, L, L)`` bool from a predicate of row, query and key; a lone query sees itself."""
    visible = torch.zeros(batch, 1, length, length, dtype=torch.bool)
    for row in range(batch):
        for query in range(length):
            keys = [key for key in range(length) if rule(row, query, key)]
            visible[row, 0, query, keys or [query]] = True
    return visible


PADDING = {
    "none": [[1] * 11, [1] * 11],
    "left": [[0] * 3 + [1] * 8, [1] * 11],
    "right": [[1] * 11, [1] * 7 + [0] * 4],
    "both": [[0] * 2 + [1] * 8 + [0], [0] * 5 + [1] * 6],
}
