"""The result type of every loss, and the masked diffusion bound."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lit_dlm.tensors.fused_head import TokenStats


@dataclass(frozen=True)
class LossTerms:
    """What a loss function returns: the scalar to minimise, and its parts."""

    total: Tensor
    """Scalar, differentiable, already normalised over the local batch."""
    parts: dict[str, Tensor] = field(default_factory=dict)
    """Detached scalars by name, for logging only."""
    sums: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Instead of parts: detached sums and numbers of units, both scalars, from which means over
    several batches follow; a count has 0 units."""

    def means(self) -> dict[str, Tensor]:
        """Returns the means that ``sums`` have in this batch alone."""
        return {name: value / units.clamp_min(1) for name, (value, units) in self.sums.items()}


def masked_nelbo(stats: TokenStats, hidden: Tensor) -> LossTerms:
    """Upper bound on the negative log-likelihood of the cells, per cell (LLaDA, 2502.09992, eq. 3).

    When the number of hidden cells of a row is uniform on ``1..G``, this is an unbiased estimate in
    nats per cell. Rows without hidden cells count as zero.

    Args:
        stats: scores of the hidden cells, row by row (``N`` of them).
        hidden: ``(B, G)`` bool, cells that the model saw as mask.
    """
    B, G = hidden.shape
    weight = (G / hidden.sum(1, keepdim=True).clamp(min=1).float()).expand(B, G)[hidden]
    count = max(len(weight), 1)
    with torch.no_grad():
        parts = {
            "cross_entropy": stats.ce.sum() / count,
            "accuracy": stats.is_top.float().sum() / count,
        }
    return LossTerms(total=(stats.ce * weight).sum() / (B * G), parts=parts)
