"""Muon for matrices and AdamW for the rest, in one optimiser.

One optimiser, not two, keeps automatic optimisation, one step counter and one checkpoint entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer


class MuonAdamW(Optimizer):
    """``torch.optim.Muon`` for ``matrices``, ``torch.optim.AdamW`` for ``others``.

    Args:
        matrices: parameters with two dimensions that map vectors to vectors. An update has a
            spectral norm of about ``matrix_lr * sqrt(max(1, rows / columns))``.
        others: everything else: embeddings, norms and biases.
    """

    def __init__(
        self,
        matrices: Iterable[Tensor],
        others: Iterable[Tensor],
        *,
        matrix_lr: float = 0.01,
        other_lr: float = 3e-3,
    ) -> None:
        parts = (
            Muon(matrices, lr=matrix_lr, weight_decay=0.0),
            AdamW(others, lr=other_lr, betas=(0.9, 0.95), weight_decay=0.0),
        )
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part, group in zip(self._parts, self.param_groups, strict=True):
            # Anew, since a checkpoint that is loaded replaces both.
            part.param_groups, part.state = [group], self.state
            part.step()
        return loss
