"""How far apart the entropies of open positions lie (TABOM's diagnostic, arXiv:2605.11854)."""

from __future__ import annotations

import torch
from torch import Tensor


def entropy_variance(entropy: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Population variance of the chosen entropies of each row.

    A model that can tell certain from uncertain positions has a large one: the Trajectory
    Discrimination Score is its mean over rows that have at least two chosen positions.

    Args:
        entropy: ``(B, L)`` floating point, nats; anything outside the chosen positions.
        chosen: ``(B, L)`` bool.

    Returns:
        ``variance`` ``(B,)``, 0 where a row has fewer than two, and ``counts`` ``(B,)`` bool, the
        rows that have them.
    """
    count = chosen.sum(1)
    values = torch.where(chosen, entropy, 0.0)
    mean = values.sum(1) / count.clamp_min(1)
    spread = torch.where(chosen, values - mean[:, None], 0.0)
    variance = spread.square().sum(1) / count.clamp_min(1)
    return variance, count >= 2
