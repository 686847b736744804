"""Per-token cross-entropy and entropy from hidden rows and the head weight, without all logits.

The vocabulary is processed in slices: the logits of some rows and one slice exist only while they
are in use, and the sums of softmax and entropy are carried from slice to slice (as FlashAttention,
arXiv 2205.14135, carries its softmax along keys). For the backward pass, a few numbers per row are
kept; it computes the logits again and forms the gradient analytically. With
``z = h W^T``, ``p = softmax(z)`` and target ``y``, ``CE = lse(z) - z_y`` and
``H = lse(z) - sum p z``::

    dCE/dz = p - onehot(y)            dH/dz = -p (log p + H)

Rows that need no loss should never get here: leaving them out before the head saves the most.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lit_dlm.tensors.precision import without_autocast

CHUNK_ROWS = 4096
"""Rows processed together: each such chunk reads the whole weight once per pass."""

CHUNK_ELEMENTS = {"cpu": 1_000_000, "cuda": 32_000_000}
"""Logits held at a time, by type of device: on a CPU few enough to stay in its cache."""

_SMALLEST_SLICE = 256


class TokenStats(NamedTuple):
    """What losses need to know about each scored token."""

    ce: Tensor  # (N,) float32 (float64 from float64 inputs): cross-entropy of the target, in nats
    entropy: Tensor  # (N,) of the same dtype: entropy of the prediction, in nats
    is_top: Tensor  # (N,) bool: whether no id is more probable than the target. Without gradient

    @property
    def log_prob(self) -> Tensor:
        """``(N,)``: log-probability of the target, ``-ce``."""
        return -self.ce


def token_stats(
    rows: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    logit_scale: float = 1.0,
    forbidden_ids: Sequence[int] = (),
) -> TokenStats:
    """Scores one target per hidden row under ``softmax(logit_scale * rows weight^T)``.

    Logits, sums and gradients are float32 whatever the inputs' dtype (float64 stays float64), also
    under autocast. On GPUs, tensor cores compute the logits of rows and a weight in the same half
    precision: they multiply exactly and add in float32. For bfloat16 inputs, they also compute the
    gradients, from the logits' gradient in bfloat16. Everything else is widened slice by slice;
    there ``tf32: true`` in a run allows tensor cores. The host never waits for the device.

    Args:
        rows: ``(N, D)`` aligned hidden rows after the final norm; ``N`` may be 0.
        weight: ``(V, D)``, the head; if it is frozen, it costs no gradient.
        targets: ``(N,)`` int64 ids below ``V``.
        forbidden_ids: ids without probability; as a target, one has infinite cross-entropy.
    """
    forbidden = _Forbidden.of(forbidden_ids, rows.device)
    arguments = (rows, weight, targets, float(logit_scale), forbidden)
    with without_autocast(rows.device):  # which would round the products to half precision
        return TokenStats(*_FusedHead.apply(*arguments))


@torch.no_grad()
def top_ids(rows: Tensor, weight: Tensor, *, forbidden_ids: Sequence[int] = ()) -> Tensor:
    """Returns ``(N,)`` int64: the most probable id of each row, of equal ones the lowest.

    Arguments are those of :func:`token_stats`.
    """
    forbidden = _Forbidden.of(forbidden_ids, rows.device)
    top = rows.new_full((len(rows),), float("-inf"), dtype=_compute_dtype(rows))
    ids = torch.zeros(len(rows), dtype=torch.long, device=rows.device)
    with without_autocast(rows.device):
        for chunk, part, logits, _ in _logit_slices(rows, weight, 1.0, forbidden):
            value, number = logits.max(1)
            ids[chunk] = torch.where(value > top[chunk], number + part.start, ids[chunk])
            top[chunk] = torch.maximum(value, top[chunk])
    return ids


class _Forbidden(NamedTuple):
    """Ids in ascending order, on the host and on the device, so that no slice waits for either."""

    ids: list[int]
    there: Tensor

    @classmethod
    def of(cls, ids: Sequence[int], device: torch.device) -> _Forbidden:
        known = sorted(set(ids))
        return cls(known, torch.tensor(known, dtype=torch.long).to(device, non_blocking=True))

    def fill(self, values: Tensor, part: slice, value: float) -> None:
        """Fills the columns of those ids in values of one slice of the vocabulary."""
        first, last = (bisect_left(self.ids, bound) for bound in (part.start, part.stop))
        if first < last:
            values.index_fill_(1, self.there[first:last] - part.start, value)


class _FusedHead(torch.autograd.Function):
    """Saves ``lse`` (as largest logit and remainder, for accuracy) and ``H`` of every row."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, targets: Tensor, scale: float, forbidden: _Forbidden
    ) -> tuple[Tensor, Tensor, Tensor]:
        N = len(rows)
        dtype = _compute_dtype(rows)
        lowest = torch.finfo(dtype).min
        top, target = (rows.new_full((N,), lowest, dtype=dtype) for _ in range(2))
        # Sums over the slices so far of e = exp(z - top) and of e (z - top).
        total, moment = (rows.new_zeros(N, dtype=dtype) for _ in range(2))
        for chunk, part, logits, probs in _logit_slices(rows, weight, scale, forbidden):
            # Gathered from every slice, used from the one that holds it: asking which would wait.
            wanted = targets[chunk, None] - part.start
            is_here = (wanted >= 0) & (wanted < part.stop - part.start)
            found = logits.gather(1, wanted.clamp(0, part.stop - part.start - 1))
            target[chunk] = torch.where(is_here, found, target[chunk, None]).squeeze(1)
            before = top[chunk].clone()
            highest = torch.maximum(before, logits.amax(dim=1))
            top[chunk] = highest
            logits.sub_(highest[:, None])
            torch.exp(logits, out=probs)
            forbidden.fill(logits, part, 0.0)  # exp(-inf) is 0, but 0 * -inf is not
            # Earlier sums are relative to a lower top; exp(-1e4) is 0 in every dtype.
            fall = (before - highest).clamp_min_(-1e4)
            kept = fall.exp()
            moment[chunk] = kept * (moment[chunk] + fall * total[chunk]) + logits.mul_(probs).sum(1)
            total[chunk] = kept * total[chunk] + probs.sum(1)
        log_total = total.log()
        ce = log_total - (target - top)
        # Rounding can leave a certain prediction a hair below zero.
        entropy = (log_total - moment / total).clamp_min_(0.0)
        is_top = target == top
        ctx.save_for_backward(rows, weight, targets, top, log_total, entropy)
        ctx.scale, ctx.forbidden = scale, forbidden
        ctx.mark_non_differentiable(is_top)
        # An output that no loss uses has no gradient, which saves its term in the backward pass.
        ctx.set_materialize_grads(False)
        return ce, entropy, is_top

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_ce: Tensor | None, grad_entropy: Tensor | None, _is_top: None
    ) -> tuple[Tensor | None, ...]:
        rows, weight, targets, top, log_total, entropy = ctx.saved_tensors
        wants_rows, wants_weight = ctx.needs_input_grad[:2]
        dtype = _compute_dtype(rows)
        grad_rows = torch.zeros_like(rows, dtype=dtype) if wants_rows else None
        grad_weight = torch.zeros_like(weight, dtype=dtype) if wants_weight else None
        with without_autocast(rows.device):
            for chunk, part, logits, probs in _logit_slices(rows, weight, ctx.scale, ctx.forbidden):
                # Subtracted one after the other: their sum would be rounded.
                log_probs = logits.sub_(top[chunk, None]).sub_(log_total[chunk, None])
                torch.exp(log_probs, out=probs)
                grad = _logit_gradient(
                    probs,
                    log_probs,
                    targets[chunk, None] - part.start,
                    entropy[chunk, None],
                    grad_ce=None if grad_ce is None else grad_ce[chunk, None],
                    grad_entropy=None if grad_entropy is None else grad_entropy[chunk, None],
                )
                # A forbidden target has an infinite loss but no logit to blame.
                ctx.forbidden.fill(grad, part, 0.0)
                if grad_rows is not None:
                    _add_product(grad_rows[chunk], grad, weight[part], ctx.scale)
                if grad_weight is not None:
                    _add_product(grad_weight[part], grad.T, rows[chunk], ctx.scale)
        return (
            None if grad_rows is None else grad_rows.to(rows.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            *[None] * 3,
        )


def _logit_gradient(
    probs: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    entropy: Tensor,
    *,
    grad_ce: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """``dL/dz`` of one slice ``(n, S)``, in the memory of an argument; other tensors ``(n, 1)``.

    Targets are relative to the slice's first id; those outside it contribute in other slices.
    """
    if grad_entropy is None:
        grad = probs.zero_() if grad_ce is None else probs.mul_(grad_ce)
    else:
        # p (g_ce - g_H (log p + H)); not a number at forbidden ids, which the caller overwrites.
        offset = -grad_entropy * entropy
        if grad_ce is not None:
            offset = offset + grad_ce
        grad = log_probs.mul_(-grad_entropy).add_(offset).mul_(probs)
    if grad_ce is not None:
        is_here = (targets >= 0) & (targets < probs.shape[1])
        share = torch.where(is_here, -grad_ce, 0.0).to(grad.dtype)
        grad.scatter_add_(1, targets.clamp(0, probs.shape[1] - 1), share)
    return grad


def _has_tensor_cores(tensor: Tensor) -> bool:
    """Whether the device multiplies half precision into float32."""
    return tensor.is_cuda


def _products(rows: Tensor, weight: Tensor, *, out: Tensor) -> None:
    """``out = rows weight^T``, ``(n, S)``, computed in the dtype of ``out``."""
    if _has_tensor_cores(rows) and rows.dtype == weight.dtype != out.dtype:
        torch.mm(rows, weight.T, out_dtype=out.dtype, out=out)
    else:
        torch.mm(rows.to(out.dtype), weight.to(out.dtype).T, out=out)


def _add_product(total: Tensor, grad: Tensor, other: Tensor, scale: float) -> None:
    """``total += scale * grad other``, where ``grad`` is the logits' gradient or its transpose.

    In float16 that gradient would lose its smallest numbers; bfloat16 keeps their range.
    """
    if _has_tensor_cores(grad) and other.dtype == torch.bfloat16:
        torch.addmm(total, grad.bfloat16(), other, out_dtype=total.dtype, alpha=scale, out=total)
    else:
        total.addmm_(grad, other.to(total.dtype), alpha=scale)


def _compute_dtype(rows: Tensor) -> torch.dtype:
    return torch.float64 if rows.dtype == torch.float64 else torch.float32


def _logit_slices(
    rows: Tensor, weight: Tensor, scale: float, forbidden: _Forbidden
) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Yields rows, ids, their logits and an equally large buffer; the next slice reuses both."""
    dtype = _compute_dtype(rows)
    height = min(CHUNK_ROWS, len(rows))
    if not height:
        return
    elements = CHUNK_ELEMENTS.get(rows.device.type, CHUNK_ELEMENTS["cuda"])
    # In whole tiles: the fast half-precision products of a GPU need aligned rows.
    width = min(max(elements // height // 128 * 128, _SMALLEST_SLICE), len(weight))
    logits_buffer, spare_buffer = rows.new_empty(2, height * width, dtype=dtype)
    for first in range(0, len(rows), CHUNK_ROWS):
        chunk = slice(first, min(first + CHUNK_ROWS, len(rows)))
        picked = rows[chunk]
        for begin in range(0, len(weight), width):
            part = slice(begin, min(begin + width, len(weight)))
            size = (chunk.stop - first, part.stop - begin)
            # Narrower views of one buffer, contiguous whatever their size.
            logits = logits_buffer[: size[0] * size[1]].view(size)
            _products(picked, weight[part], out=logits)
            if scale != 1.0:
                logits *= scale
            forbidden.fill(logits, part, float("-inf"))
            yield chunk, part, logits, spare_buffer[: size[0] * size[1]].view(size)
