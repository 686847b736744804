"""The most probable tokens, how sure a distribution is, and choosing the surest positions."""

from __future__ import annotations

import torch
from torch import Tensor

_LARGE = 4096
"""Ids from which on a whole softmax, which is one kernel, costs half of a sum of exponentials."""


def confidence(logits: Tensor, ids: Tensor) -> Tensor:
    """``(...)`` softmax probability of ids under ``(..., V)`` logits, float32 at least."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if logits.shape[-1] >= _LARGE:
        return logits.softmax(-1).gather(-1, ids[..., None])[..., 0]
    picked = logits.gather(-1, ids[..., None])[..., 0]
    return (picked - logits.logsumexp(-1)).exp()


def entropy(logits: Tensor) -> Tensor:
    """``(...)`` nats, float32 at least: Shannon entropy of the softmax of ``(..., V)`` logits.

    Entries may be ``-inf`` (probability 0).
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return torch.special.entr(logits.softmax(-1)).sum(-1)


def margin(logits: Tensor) -> Tensor:
    """``(...)`` gap of the two largest probabilities of ``(..., V)`` logits, float32 at least."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    top = (logits.topk(2, dim=-1).values - logits.logsumexp(-1, keepdim=True)).exp()
    return top[..., 0] - top[..., 1]


def rank_descending(scores: Tensor, candidates: Tensor) -> Tensor:
    """``(B, L)`` int64 rank of each candidate by ``(B, L)`` scores, best first, then leftmost.

    Columns outside the ``(B, L)`` bool candidates come after them.
    """
    order = _among(scores, candidates).argsort(dim=1, descending=True, stable=True)
    columns = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, columns)


def top_quota(scores: Tensor, candidates: Tensor, quota: Tensor | int) -> Tensor:
    """``(B, L)`` bool: the best ``quota`` of each row's candidates, by ``(B, L)`` scores."""
    if isinstance(quota, int) and quota == 1:
        best = _among(scores, candidates).argmax(1, keepdim=True)
        return torch.zeros_like(candidates).scatter_(1, best, True) & candidates
    limit = quota[:, None] if isinstance(quota, Tensor) else quota
    return candidates & (rank_descending(scores, candidates) < limit)


def _among(scores: Tensor, candidates: Tensor) -> Tensor:
    """Scores by which every candidate, be its own ``-inf``, comes before all other columns."""
    least = torch.finfo(scores.dtype).min
    return scores.clamp_min(least).masked_fill_(~candidates, -torch.inf)


_BLOCK = 256


def arg_max(logits: Tensor) -> Tensor:
    """``(...)`` int64: the most probable token of ``(..., V)`` logits, the lowest of equals."""
    # There only the maximum itself is vectorised: torch's arg-max takes twice as long as a softmax.
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    return _first_arg_max(logits.reshape(-1, logits.shape[-1])).reshape(logits.shape[:-1])


def _first_arg_max(rows: Tensor) -> Tensor:
    """``(n,)`` int64 arg-max: first of the blocks' maxima, which reduce fast, then in one block."""
    whole = rows.shape[1] // _BLOCK * _BLOCK
    if whole <= _BLOCK:
        return rows.argmax(-1)
    tops = rows[:, :whole].unflatten(1, (-1, _BLOCK)).amax(-1)
    if whole < rows.shape[1]:
        tops = torch.cat([tops, rows[:, whole:].amax(-1, keepdim=True)], dim=1)
    block = tops.argmax(-1)
    # A last block that is cut short reads further left, where nothing is as large.
    begin = (block * _BLOCK).clamp_max(rows.shape[1] - _BLOCK)
    inner = rows.gather(1, begin[:, None] + torch.arange(_BLOCK))
    return begin + inner.argmax(-1)


def entropy_variance(entropy: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Population variance of the chosen entropies of each row (TABOM, arXiv:2605.11854).

    A model that can tell certain from uncertain positions has a large one: the Trajectory
    Discrimination Score is its mean over rows that have at least two chosen positions, as the
    second result ``(B,)`` bool says. ``entropy`` ``(B, L)`` is in nats.
    """
    count = chosen.sum(1)
    values = torch.where(chosen, entropy, 0.0)
    mean = values.sum(1) / count.clamp_min(1)
    spread = torch.where(chosen, values - mean[:, None], 0.0)
    variance = spread.square().sum(1) / count.clamp_min(1)
    return variance, count >= 2
