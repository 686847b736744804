"""The masked diffusion bound: cross-entropy on hidden cells, weighted by one over their share."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_dlm.losses.terms import LossTerms
from lit_dlm.ops.fused_head import TokenStats


def masked_nelbo(stats: TokenStats, hidden: Tensor) -> LossTerms:
    """Upper bound on the negative log-likelihood of the cells, per cell (LLaDA, 2502.09992, eq. 3).

    When the number of hidden cells of a row is uniform on ``1..G``, this is an unbiased estimate in
    nats a cell. Rows without any count as zero.

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
