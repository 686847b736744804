"""Which positions were decoded out of order."""

from __future__ import annotations

from torch import Tensor


def non_ltr_positions(steps: Tensor) -> Tensor:
    """``(..., L)`` bool: positions written before one to their left, from ``(..., L)`` steps.

    The release's data contain a list made by an unpublished script; this is our reading of its
    name.
    """
    return (steps >= 0) & (steps.cummax(dim=-1).values > steps)
