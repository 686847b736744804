"""The value head, which reads the reward to come from a masked position's hidden row; its loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lit_dlm.tensors.precision import without_autocast
from lit_dlm.training.terms import LossTerms


class ValueHead(nn.Module):
    """A linear map without bias from hidden rows to values, zero at the start.

    So the first advantages are the returns themselves (TraceRL, arXiv:2509.06949). Weights are
    float32 whatever the backbone's dtype, since small updates would be rounded away otherwise.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, rows: Tensor) -> Tensor:
        """``(N,)`` float32 (or float64) values of ``(N, D)`` hidden rows after the final norm."""
        dtype = torch.promote_types(rows.dtype, torch.float32)
        with without_autocast(rows.device):
            return rows.to(dtype) @ self.weight.to(dtype)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weight: Tensor, *, clip: float = 0.2
) -> LossTerms:
    """``0.5 max((V - R)^2, (V_old + clamp(V - V_old, -c, c) - R)^2)``, a weighted sum.

    The larger of the two errors counts: a value that has moved by more than ``clip`` towards its
    return gets no further push (TraceRL, arXiv:2509.06949; PPO implementations). All are ``(N,)``.
    """
    # The maximum, not PPO's minimum: this is a loss, whose pessimistic side is the larger error.
    moved = (values - old_values).clamp(-clip, clip)
    plain, clipped = (values - returns) ** 2, (old_values + moved - returns) ** 2
    return LossTerms(0.5 * (weight * torch.maximum(plain, clipped)).sum())
