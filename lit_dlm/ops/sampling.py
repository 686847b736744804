"""Filters on logits that shape the proposal distribution."""

from __future__ import annotations

import torch
from torch import Tensor


def keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    """Sets everything below the ``top_k`` largest logits to ``-inf``.

    Args:
        logits: ``(..., V)``.
        top_k: how many entries to keep, at least 1; ties with the last kept value stay.

    Returns:
        ``(..., V)``.
    """
    if top_k >= logits.shape[-1]:
        return logits
    smallest = logits.topk(top_k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < smallest, -torch.inf)


def keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Nucleus filter: keeps the smallest set of tokens whose probability reaches ``top_p``.

    The token that crosses the bound is kept, so at least one always remains
    (Holtzman et al., arXiv 1904.09751).

    Args:
        logits: ``(..., V)``.
        top_p: in (0, 1].

    Returns:
        ``(..., V)`` with dropped entries at ``-inf``.
    """
    if top_p >= 1.0:
        return logits
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    probs = values.softmax(-1)
    drop = probs.cumsum(-1) - probs >= top_p
    return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)
