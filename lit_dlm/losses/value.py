"""Regression of values on returns, with the clipped step of PPO."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_dlm.losses.terms import LossTerms


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weight: Tensor, *, clip: float = 0.2
) -> LossTerms:
    """``0.5 max((V - R)^2, (V_old + clamp(V - V_old, -c, c) - R)^2)``, a weighted sum.

    The larger of both errors: a value that has moved by more than ``clip`` towards its return
    gets no further push (TraceRL, arXiv:2509.06949; PPO implementations). All are ``(N,)``; the
    part ``clip_fraction`` is the share of tokens with weight whose value moved beyond the clip.
    """
    moved = (values - old_values).clamp(-clip, clip)
    plain, clipped = (values - returns) ** 2, (old_values + moved - returns) ** 2
    total = 0.5 * (weight * torch.maximum(plain, clipped)).sum()
    with torch.no_grad():
        counted = weight > 0
        count = counted.sum().clamp_min(1)
        moved_on = ((values - old_values).abs() > clip) & counted
        parts = {"clip_fraction": moved_on.sum() / count}
    return LossTerms(total, parts)
