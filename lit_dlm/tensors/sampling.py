"""Filters on logits, the noise that draws from them, and how sure a distribution is.

Noise is stateless: a hash of (sample seed, step, position, token) instead of a generator's state.
A counter-based draw depends on nothing but its key. So a sample's noise is the same in any batch,
on any number of processes and at any step that is computed alone, and eight bytes per sample record
all of it. The mixing function is the finaliser of SplitMix64 (Steele, Lea and Flood,
"Fast splittable pseudorandom number generators", OOPSLA 2014), in wrapping 64-bit arithmetic.
"""

from __future__ import annotations

import hashlib

import torch
import torch.nn.functional as F
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def sample_seed(seed: int, uid: str) -> int:
    """Seed of one sample in ``[0, 2**63)``: 63 bits of SHA-256 over ``"{seed}:{uid}"``."""
    digest = hashlib.sha256(f"{seed}:{uid}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical (not arithmetic) right shift of int64."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _counter(n: int) -> int:
    """``n`` golden-ratio increments as a signed 64-bit integer."""
    return (_GOLDEN * n + 2**63) % 2**64 - 2**63


def _mix(x: Tensor) -> Tensor:
    """Mixes in place: a copy of a vocabulary's keys would cost as much as the arithmetic."""
    x.bitwise_xor_(_shift_right(x, 30)).mul_(_MIX_1)
    x.bitwise_xor_(_shift_right(x, 27)).mul_(_MIX_2)
    return x.bitwise_xor_(_shift_right(x, 31))


def uniform_noise(
    seeds: Tensor,
    step: int | Tensor,
    positions: Tensor,
    *,
    stream: int = 0,
    tokens: Tensor | None = None,
) -> Tensor:
    """``(B, K)`` or ``(B, K, T)`` float64 uniform draws in the open interval (0, 1).

    Args:
        seeds: ``(B,)`` int64 sample seeds.
        step: decode step; ``(B,)`` int64 where rows are in different ones.
        positions: ``(B, K)`` int64 positions *within the sample* (not canvas columns, which
            depend on the padding of the batch).
        stream: separates uses of the same key (0 proposals, 1 commit order, ...).
        tokens: ``(T,)`` or ``(B, K, T)`` int64 ids; the draw of each does not depend on the others.
    """
    # Mixed after each part: adding all parts first would make keys of (step, position) pairs with
    # equal sums collide. One is added to each, as a multiple of zero would change nothing.
    key = _mix(seeds + _counter(stream + 1))
    key = _mix(key + (_counter(step + 1) if isinstance(step, int) else _GOLDEN * (step + 1)))
    key = _mix(key[:, None] + _GOLDEN * (positions + 1))
    if tokens is not None:
        key = _mix(key[..., None] + _GOLDEN * (tokens + 1))
    return _uniform(key)


def _uniform(key: Tensor) -> Tensor:
    # 53 bits, as many as a float64 holds; the half keeps 0 and 1 out, for the logarithms.
    return _shift_right(key, 11).to(torch.float64).add_(0.5).mul_(2.0**-53)


def gumbel_noise(seeds: Tensor, step: int | Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """``(B, K, T)`` float64 standard Gumbel draws for ids; arguments as in :func:`uniform_noise`.

    Adding them to logits and taking the arg-max draws from their softmax.
    """
    return uniform_noise(seeds, step, positions, tokens=tokens).log_().neg_().log_().neg_()


def cell_gumbel_noise(seeds: Tensor, steps: Tensor, positions: Tensor, size: int) -> Tensor:
    """``(n, size)`` float64 standard Gumbel draws for cells, with one round of mixing, not four.

    A GPU waits for the launches of small rounds. No two keys that a sample mixes are equal, for
    steps and positions below 2**20 and draws below 2**11. Arguments are ``(n,)`` int64.
    """
    key = torch.add(seeds, steps, alpha=_MIX_1).add_(positions, alpha=_MIX_2)
    numbers = torch.arange(1, size + 1, device=seeds.device)
    key = _mix(torch.add(key[:, None], numbers, alpha=_GOLDEN))
    return _uniform(key).log_().neg_().log_().neg_()


_FIRST_LOOK = 1024
RUN = 1024
"""Ids in a run: from a larger vocabulary, a run is drawn first and then an id in it."""


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
    ``log_total`` ``(..., 1)`` is the log of the sum of all exponentials, if ``logits`` lack some.
    """
    if top_p >= 1.0:
        return logits
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    if log_total is None:
        log_total = logits.logsumexp(-1, keepdim=True)
    probs = (values - log_total).exp()
    # The sum before a token, not with it: the one that crosses the bound stays.
    drop = probs.cumsum(-1) - probs >= top_p
    return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)


def survivors(
    logits: Tensor, *, top_k: int | None, top_p: float | None
) -> tuple[Tensor, Tensor | None]:
    """Returns what is left of ``(n, V)`` logits after both filters, without a full sort.

    The nucleus is that of the whole distribution, of which the ``top_k`` largest are kept (Dream).
    A vocabulary is seldom worth sorting: the filters look only at the largest logits, and at more
    of them only if these do not settle the bound or its ties. On a GPU this check waits for the
    device. Returns ``(n, m)`` logits, dropped ones at ``-inf``, and their ids, which ascend; these
    are ``None`` if ``m`` is the whole vocabulary.
    """
    V = logits.shape[-1]
    if top_k is None and (top_p is None or top_p >= 1.0):
        return logits, None
    log_total = None if top_p is None else logits.logsumexp(-1, keepdim=True)
    size = _FIRST_LOOK if top_k is None else max(_FIRST_LOOK, 2 * top_k)

    def filtered(values: Tensor) -> Tensor:
        kept = values if top_p is None else keep_top_p(values, top_p, log_total=log_total)
        return kept if top_k is None else keep_top_k(kept, top_k)

    while size < V:
        ids = logits.topk(size, dim=-1).indices.sort(-1).values
        values = logits.gather(-1, ids)
        smallest = values.amin(-1, keepdim=True)
        kept = filtered(values)
        # An entry equal to the smallest may have been kept instead of a tied one outside.
        if not bool(((kept == smallest) & (kept > -torch.inf)).any()):
            return kept, ids
        size *= 16
    return filtered(logits), None


def draw_by_runs(logits: Tensor, noise: Tensor) -> Tensor:
    """``(n,)`` int64 ids drawn from softmaxes, with noise for a part of the vocabulary.

    The arg-max of ``(n, V)`` logits plus Gumbel noise is a draw. Here a run of :data:`RUN` ids is
    drawn first, by the runs' probabilities, then an id in it: 1,173 numbers for a vocabulary of
    152,000. Noise is ``(n, RUN + number of runs)`` float64: for ids in a run, then for runs.
    """
    V = logits.shape[1]
    run = _run_logits(logits).add(noise[:, RUN:]).argmax(-1, keepdim=True)
    ids = run * RUN + torch.arange(RUN, device=logits.device)
    values = logits.gather(1, ids.clamp_max(V - 1)) + noise[:, :RUN]
    return ids.gather(1, values.masked_fill_(ids >= V, -torch.inf).argmax(-1, keepdim=True))[:, 0]


def perturbed_by_runs(logits: Tensor, noise: Tensor) -> Tensor:
    """``(n, V)`` float64 values whose arg-max :func:`draw_by_runs` draws from equal arguments."""
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


_LARGE = 4096
"""Vocabulary from which a whole softmax, a single kernel, costs half of a sum of exponentials."""


def confidence(logits: Tensor, ids: Tensor) -> Tensor:
    """``(...)`` softmax probability of ids under ``(..., V)`` logits, float32 at least."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if logits.shape[-1] >= _LARGE:
        return logits.softmax(-1).gather(-1, ids[..., None])[..., 0]
    picked = logits.gather(-1, ids[..., None])[..., 0]
    return (picked - logits.logsumexp(-1)).exp()


def entropy(logits: Tensor) -> Tensor:
    """``(...)`` nats, float32 at least: entropy of the softmax of ``(..., V)`` logits."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return torch.special.entr(logits.softmax(-1)).sum(-1)


def margin(logits: Tensor) -> Tensor:
    """``(...)`` gap between the top two probabilities of ``(..., V)`` logits, float32 at least."""
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
    """Returns scores that put every candidate, even one at ``-inf``, before all other columns."""
    least = torch.finfo(scores.dtype).min
    return scores.clamp_min(least).masked_fill_(~candidates, -torch.inf)


_BLOCK = 256


def arg_max(logits: Tensor) -> Tensor:
    """``(...)`` int64: the most probable token of ``(..., V)`` logits, the lowest of equals."""
    V = logits.shape[-1]
    whole = V // _BLOCK * _BLOCK
    if logits.device.type != "cpu" or whole <= _BLOCK:
        return logits.argmax(-1)
    # On a CPU only the maximum is vectorised; torch's arg-max takes twice as long as a softmax.
    rows = logits.reshape(-1, V)
    tops = rows[:, :whole].unflatten(1, (-1, _BLOCK)).amax(-1)
    if whole < V:
        tops = torch.cat([tops, rows[:, whole:].amax(-1, keepdim=True)], dim=1)
    # A last block that is cut short reads further left, where nothing is as large.
    begin = (tops.argmax(-1) * _BLOCK).clamp_max(V - _BLOCK)
    inner = rows.gather(1, begin[:, None] + torch.arange(_BLOCK))
    return (begin + inner.argmax(-1)).reshape(logits.shape[:-1])


def entropy_variance(entropy: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Population variance of the chosen entropies of each row (TABOM, arXiv:2605.11854).

    It is large if a model can tell certain from uncertain positions: the Trajectory Discrimination
    Score is its mean over rows with at least two chosen positions, which the second result ``(B,)``
    bool marks. ``entropy`` ``(B, L)`` is in nats.
    """
    count = chosen.sum(1)
    values = torch.where(chosen, entropy, 0.0)
    mean = values.sum(1) / count.clamp_min(1)
    spread = torch.where(chosen, values - mean[:, None], 0.0)
    variance = spread.square().sum(1) / count.clamp_min(1)
    return variance, count >= 2
