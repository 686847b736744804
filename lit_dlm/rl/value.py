"""The value head: what a masked position's hidden row says about the reward to come."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lit_dlm.tensors.precision import without_autocast


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
