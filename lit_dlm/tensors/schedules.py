"""Which response cells a training state hides: how many, and which ones.

The count is drawn, not the noise level: with ``n`` of ``G`` cells hidden, uniform ``n`` in
``1..G`` and weight ``G / n``, the estimate has the expectation of the continuous-time one (LLaDA,
arXiv 2502.09992, appendix A, says the same of its exact-count form) with lower variance.
"""

from __future__ import annotations

import torch
from torch import Tensor


def stratified_counts(num_rows: int, length: int, *, generator: torch.Generator) -> Tensor:
    """``(B,)`` int64: the number of hidden cells of each row, spread evenly over ``1..length``.

    The range is cut into as many equal strata as there are rows, each row draws inside its own,
    and the rows are shuffled. Every row alone is uniform on ``1..length``.
    """
    within = torch.rand(num_rows, generator=generator, dtype=torch.float64)
    share = (torch.arange(num_rows, dtype=torch.float64) + within) / num_rows
    counts = (share * length).long().clamp(max=length - 1) + 1
    return counts[torch.randperm(num_rows, generator=generator)]


def uniform_cells(counts: Tensor, length: int, *, generator: torch.Generator) -> Tensor:
    """``(B, G)`` bool: exactly ``counts`` ``(B,)`` cells a row, all subsets equally likely."""
    order = torch.rand(len(counts), length, generator=generator, dtype=torch.float64).argsort(1)
    return order.argsort(1) < counts[:, None]


def suffix_cells(counts: Tensor, length: int) -> Tensor:
    """``(B, G)`` bool: the last ``counts`` ``(B,)`` cells, the states of left-to-right decoding."""
    return torch.arange(length, device=counts.device) >= length - counts[:, None]


def hidden_cells(
    num_rows: int, length: int, *, suffix_share: float, generator: torch.Generator
) -> Tensor:
    """``(B, G)`` bool: uniform cells, or a suffix with probability ``suffix_share``; never none."""
    counts = stratified_counts(num_rows, length, generator=generator)
    uniform = uniform_cells(counts, length, generator=generator)
    is_suffix = torch.rand(num_rows, generator=generator, dtype=torch.float64) < suffix_share
    return torch.where(is_suffix[:, None], suffix_cells(counts, length), uniform)
