"""Weights that no random generator is needed for, so that fixtures need not hold any."""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor


def waves(name: str, shape: Sequence[int]) -> Tensor:
    """Values of a parameter of this name: about 1 for norms, small ones for all others."""
    count = torch.Size(shape).numel()
    start = zlib.crc32(name.encode()) % 10_000
    values = torch.sin(start + 12.9898 * torch.arange(count, dtype=torch.float64) ** 1.1)
    if "norm" in name and name.endswith("weight"):
        values = 1.0 + 0.2 * values
    elif len(shape) > 1:
        values = values * 1.5 / torch.Size(shape[1:]).numel() ** 0.5
    else:
        values = 0.1 * values
    return values.float().reshape(tuple(shape))
