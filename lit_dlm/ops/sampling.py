"""Filters on logits that shape the proposal distribution."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_FIRST_LOOK = 1024
RUN = 1024
"""Ids that are drawn from at once: of more, first a run of so many is drawn, then an id of it."""


def keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    """Sets everything below the ``top_k`` largest of ``(..., V)`` logits to ``-inf``; ties stay."""
    if top_k >= logits.shape[-1]:
        return logits
    smallest = logits.topk(top_k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < smallest, -torch.inf)


def keep_top_p(logits: Tensor, top_p: float, *, log_total: Tensor | None = None) -> Tensor:
    """Nucleus filter: keeps the smallest set of tokens whose probability reaches ``top_p``.

    The token that crosses the bound is kept, so at least one always remains, and of equal entries
    the first ones (Holtzman et al., arXiv 1904.09751).

    ``log_total`` ``(..., 1)`` is the log of the sum of all exponentials, where these logits are not
    all.
    """
    if top_p >= 1.0:
        return logits
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    if log_total is None:
        log_total = logits.logsumexp(-1, keepdim=True)
    probs = (values - log_total).exp()
    drop = probs.cumsum(-1) - probs >= top_p
    return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)


def survivors(
    logits: Tensor, *, top_k: int | None, top_p: float | None
) -> tuple[Tensor, Tensor | None]:
    """What is left of ``(n, V)`` logits after the two filters, without a full sort.

    A vocabulary is seldom worth sorting: the filters look at the largest logits alone, and at more
    of them only if these do not settle the bound or what is equal to it. On a GPU that question
    waits for the device. The ``(n, m)`` logits have dropped ones at ``-inf``; their ids ascend, and
    are ``None`` where ``m`` is the whole vocabulary.
    """
    V = logits.shape[-1]
    if top_k is None and (top_p is None or top_p >= 1.0):
        return logits, None
    log_total = logits.logsumexp(-1, keepdim=True) if top_k is None else None
    size = _FIRST_LOOK if top_k is None else max(_FIRST_LOOK, 2 * top_k)
    while size < V:
        ids = logits.topk(size, dim=-1).indices.sort(-1).values
        values = logits.gather(-1, ids)
        smallest = values.amin(-1, keepdim=True)
        kept = values if top_k is None else keep_top_k(values, top_k)
        kept = kept if top_p is None else keep_top_p(kept, top_p, log_total=log_total)
        # Equal to the smallest, an entry may have been taken for another one left outside.
        if not bool(((kept == smallest) & (kept > -torch.inf)).any()):
            return kept, ids
        size *= 16
    kept = logits if top_k is None else keep_top_k(logits, top_k)
    return (kept if top_p is None else keep_top_p(kept, top_p)), None


def draw_by_runs(logits: Tensor, noise: Tensor) -> Tensor:
    """``(n,)`` int64 ids drawn from softmaxes, with noise for a part of the vocabulary.

    The arg-max of logits plus Gumbel noise is a draw; here first among the runs of :data:`RUN` ids,
    by their probabilities, then among the ids of one: 1,173 numbers for a vocabulary of 152,000.

    Args:
        logits: ``(n, V)`` floating point.
        noise: ``(n, RUN + number of runs)`` float64 Gumbel draws: of the ids of a run, of the runs.
    """
    V = logits.shape[1]
    run = _run_logits(logits).add(noise[:, RUN:]).argmax(-1, keepdim=True)
    ids = run * RUN + torch.arange(RUN, device=logits.device)
    values = logits.gather(1, ids.clamp_max(V - 1)) + noise[:, :RUN]
    return ids.gather(1, values.masked_fill_(ids >= V, -torch.inf).argmax(-1, keepdim=True))[:, 0]


def perturbed_by_runs(logits: Tensor, noise: Tensor) -> Tensor:
    """``(n, V)`` float64 values whose arg-max :func:`draw_by_runs` draws, of the same arguments."""
    V = logits.shape[1]
    values = F.pad(logits, (0, -V % RUN), value=-torch.inf).unflatten(1, (-1, RUN))
    values = values + noise[:, None, :RUN]
    best = values.amax(-1).clamp_min(torch.finfo(values.dtype).min)  # a run may be forbidden
    return (values + (_run_logits(logits) + noise[:, RUN:] - best)[..., None]).flatten(1)[:, :V]


def _run_logits(logits: Tensor) -> Tensor:
    """``(n, R)`` log-probabilities of the runs."""
    probs = logits.softmax(-1)
    whole = logits.shape[1] // RUN * RUN
    totals = probs[:, :whole].unflatten(1, (-1, RUN)).sum(-1)
    if whole < logits.shape[1]:
        totals = torch.cat([totals, probs[:, whole:].sum(-1, keepdim=True)], 1)
    return totals.log()
