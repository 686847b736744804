"""The masked diffusion bound: cross-entropy on hidden cells, weighted by one over their share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_dlm.losses.terms import LossTerms


def masked_nelbo(logits: Tensor, targets: Tensor, hidden: Tensor) -> LossTerms:
    """Upper bound on the negative log-likelihood of the cells, per cell (LLaDA, 2502.09992, eq. 3).

    A row with ``n`` of its ``G`` cells hidden has weight ``G / n`` on each hidden cell, and the sum
    is divided by ``B G``: when ``n`` is uniform on ``1..G`` this is an unbiased estimate of the
    bound, in nats a cell.

    Args:
        logits: ``(B, G, V)`` float, aligned: row ``i`` predicts cell ``i``. Forbidden ids may be
            ``-inf`` if no target has one.
        targets: ``(B, G)`` int64, the clean cells.
        hidden: ``(B, G)`` bool, cells that the model saw as mask. Rows without any count as zero.

    Returns:
        ``total``, and in ``parts`` the unweighted ``cross_entropy`` and the ``accuracy`` of the
        hidden cells.

    Raises:
        ValueError: if the shapes do not fit.
    """
    if logits.shape[:2] != targets.shape or targets.shape != hidden.shape:
        raise ValueError(
            "masked_nelbo: expected logits (B, G, V) with targets and hidden (B, G), got "
            f"{tuple(logits.shape)}, {tuple(targets.shape)} and {tuple(hidden.shape)}"
        )
    B, G = targets.shape
    picked = logits[hidden].float()  # (N, V)
    wanted = targets[hidden]
    cross_entropy = F.cross_entropy(picked, wanted, reduction="none")
    weight = (G / hidden.sum(1, keepdim=True).clamp(min=1)).expand(B, G)[hidden]
    with torch.no_grad():
        count = max(int(hidden.sum()), 1)
        parts = {
            "cross_entropy": cross_entropy.sum() / count,
            "accuracy": (picked.argmax(-1) == wanted).float().sum() / count,
        }
    return LossTerms(total=(cross_entropy * weight).sum() / (B * G), parts=parts)
