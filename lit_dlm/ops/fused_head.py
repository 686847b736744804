"""Per-token cross-entropy and entropy from hidden rows and the head weight, without all logits.

The logits of a chunk of rows live only while the chunk is worked on. The backward pass keeps a few
numbers per row, computes the logits again and forms the gradient analytically. With
``z = h W^T``, ``p = softmax(z)`` and target ``y``, ``CE = lse(z) - z_y`` and
``H = lse(z) - sum p z``::

    dCE/dz = p - onehot(y)            dH/dz = -p (log p + H)

Rows that need no loss should never get here: pick them before the head, which saves the most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 15_000_000
"""Logits held at a time by default (60 MB in float32, and as much again for probabilities)."""

_ROW_MULTIPLE = 32
_VOCAB_SLICE = 8192


class TokenStats(NamedTuple):
    """What losses need of each scored token."""

    ce: Tensor
    """``(N,)`` float32 (float64 from float64 inputs): cross-entropy of the target, in nats."""
    entropy: Tensor
    """``(N,)`` of the same dtype: entropy of the prediction, in nats."""
    is_top: Tensor
    """``(N,)`` bool: whether no id is more probable than the target. Without gradient."""

    @property
    def log_prob(self) -> Tensor:
        """``(N,)``: log-probability of the target, ``-ce``."""
        return -self.ce


def token_stats(
    rows: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    forbidden_ids: Tensor | Sequence[int] = (),
    chunk_rows: int | None = None,
) -> TokenStats:
    """Scores one target per hidden row under ``softmax(logit_scale * (rows weight^T + bias))``.

    Computed in float32 whatever the inputs' dtype (float64 stays float64), also under autocast.
    Half-precision weights are widened slice by slice. On GPUs,
    ``torch.set_float32_matmul_precision("high")`` lets these products use tensor cores.

    Args:
        rows: ``(N, D)`` floating point, aligned hidden rows after the final norm; ``N`` may be 0.
        weight: ``(V, D)`` floating point, the head; may be frozen, then it costs no gradient.
        targets: ``(N,)`` int64 ids below ``V``.
        bias: ``(V,)`` floating point, where the head has one.
        logit_scale: factor on the logits; an inverse temperature goes here, too.
        forbidden_ids: ``(M,)`` int64 or integers: ids that have no probability. A target among
            them has infinite cross-entropy.
        chunk_rows: rows whose logits are held at a time; by default as many as have
            :data:`CHUNK_ELEMENTS` logits. It changes memory and speed, not results.

    Returns:
        Per-row values; ``ce`` and ``entropy`` are differentiable once with respect to ``rows``,
        ``weight`` and ``bias``.

    Raises:
        ValueError: shapes do not fit, ``chunk_rows`` is below 1, or every id is forbidden.
    """
    if rows.ndim != 2 or weight.ndim != 2 or rows.shape[1] != weight.shape[1]:
        raise ValueError(
            "token_stats: expected rows (N, D) and weight (V, D), got "
            f"{tuple(rows.shape)} and {tuple(weight.shape)}"
        )
    V = weight.shape[0]
    if targets.shape != rows.shape[:1]:
        raise ValueError(
            f"token_stats: expected targets ({len(rows)},), got {tuple(targets.shape)}"
        )
    if bias is not None and bias.shape != (V,):
        raise ValueError(f"token_stats: expected bias ({V},), got {tuple(bias.shape)}")
    if chunk_rows is None:
        chunk_rows = max(CHUNK_ELEMENTS // V // _ROW_MULTIPLE, 1) * _ROW_MULTIPLE
    elif chunk_rows < 1:
        raise ValueError(f"chunk_rows: expected at least 1, got {chunk_rows}")
    forbidden = torch.as_tensor(forbidden_ids, dtype=torch.long, device=rows.device)
    # Only a list as long as the vocabulary can name all of it, so this seldom looks at the values.
    if len(forbidden) >= V and len(forbidden.unique()) >= V:
        raise ValueError(f"forbidden_ids: all {V} ids are forbidden, none is left to predict")
    arguments = (rows, weight, bias, targets, float(logit_scale), forbidden, chunk_rows)
    with _full_precision(rows):
        return TokenStats(*_FusedHead.apply(*arguments))


class _FusedHead(torch.autograd.Function):
    """Keeps ``lse`` (as largest logit and remainder, for accuracy) and ``H`` of every row."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scale: float,
        forbidden: Tensor,
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        N = len(rows)
        dtype = _compute_dtype(rows)
        ce, entropy, top, log_total = (rows.new_empty(N, dtype=dtype) for _ in range(4))
        is_top = targets.new_empty(N, dtype=torch.bool)
        for chunk, logits, probs in _chunked_logits(
            rows, weight, bias, scale, forbidden, chunk_rows
        ):
            top[chunk] = logits.amax(dim=1)
            target = logits.gather(1, targets[chunk, None]).squeeze(1) - top[chunk]
            torch.exp(logits.sub_(top[chunk, None]), out=probs)  # times their sum
            total = probs.sum(1)
            # exp(-inf) is 0, but 0 * -inf is not.
            logits.index_fill_(1, forbidden, 0.0)
            mean = probs.mul_(logits).sum(1) / total  # of the logits, less the largest
            log_total[chunk] = total.log()
            ce[chunk] = log_total[chunk] - target
            # Rounding can leave a certain prediction a hair below zero.
            entropy[chunk] = (log_total[chunk] - mean).clamp_min_(0.0)
            is_top[chunk] = target == 0
        ctx.save_for_backward(rows, weight, bias, targets, forbidden, top, log_total, entropy)
        ctx.scale, ctx.chunk_rows = scale, chunk_rows
        ctx.mark_non_differentiable(is_top)
        ctx.set_materialize_grads(False)
        return ce, entropy, is_top

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_ce: Tensor | None, grad_entropy: Tensor | None, _is_top: None
    ) -> tuple[Tensor | None, ...]:
        rows, weight, bias, targets, forbidden, top, log_total, entropy = ctx.saved_tensors
        wants_rows, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dtype = _compute_dtype(rows)
        grad_rows = torch.empty_like(rows) if wants_rows else None
        grad_weight = torch.zeros_like(weight, dtype=dtype) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=dtype) if wants_bias else None
        with _full_precision(rows):
            for chunk, logits, probs in _chunked_logits(
                rows, weight, bias, ctx.scale, forbidden, ctx.chunk_rows
            ):
                log_probs = logits.sub_(top[chunk, None]).sub_(log_total[chunk, None])
                torch.exp(log_probs, out=probs)
                grad = _logit_gradient(
                    probs,
                    log_probs,
                    targets[chunk, None],
                    entropy[chunk, None],
                    forbidden,
                    grad_ce=None if grad_ce is None else grad_ce[chunk, None],
                    grad_entropy=None if grad_entropy is None else grad_entropy[chunk, None],
                )
                if ctx.scale != 1.0:
                    grad.mul_(ctx.scale)
                if grad_rows is not None:
                    grad_rows[chunk] = _times_weight(grad, weight)
                if grad_weight is not None:
                    grad_weight.addmm_(grad.T, rows[chunk].to(dtype))
                if grad_bias is not None:
                    grad_bias += grad.sum(0)
        return (
            grad_rows,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 4,
        )


def _logit_gradient(
    probs: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    entropy: Tensor,
    forbidden: Tensor,
    *,
    grad_ce: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """``dL/dz`` of one chunk, in the memory of ``probs`` or ``log_probs``; columns ``(n, 1)``."""
    if grad_entropy is None:
        grad = probs.zero_() if grad_ce is None else probs.mul_(grad_ce)
    else:
        # p (g_ce - g_H (log p + H))
        offset = -grad_entropy * entropy
        if grad_ce is not None:
            offset = offset + grad_ce
        grad = log_probs.mul_(-grad_entropy).add_(offset).index_fill_(1, forbidden, 0.0).mul_(probs)
    if grad_ce is not None:
        grad.scatter_add_(1, targets, -grad_ce)
        # A forbidden target has an infinite loss but no logit to blame.
        grad.index_fill_(1, forbidden, 0.0)
    return grad


def _full_precision(rows: Tensor) -> torch.autocast:
    """Autocast would round the products to half precision."""
    return torch.autocast(rows.device.type, enabled=False)


def _compute_dtype(rows: Tensor) -> torch.dtype:
    return torch.float64 if rows.dtype == torch.float64 else torch.float32


def _chunked_logits(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: float,
    forbidden: Tensor,
    chunk_rows: int,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yields row slices, their logits, and a spare buffer as large; the next chunk reuses both."""
    dtype = _compute_dtype(rows)
    buffers = rows.new_empty(2, min(chunk_rows, len(rows)), len(weight), dtype=dtype)
    for first in range(0, len(rows), chunk_rows):
        chunk = slice(first, min(first + chunk_rows, len(rows)))
        logits, spare = buffers[:, : chunk.stop - first]
        picked = rows[chunk].to(dtype)
        for part in _vocabulary_slices(weight, dtype):
            torch.mm(picked, weight[part].to(dtype).T, out=logits[:, part])
        if bias is not None:
            logits += bias.to(dtype)
        if scale != 1.0:
            logits *= scale
        yield chunk, logits.index_fill_(1, forbidden, float("-inf")), spare


def _times_weight(grad: Tensor, weight: Tensor) -> Tensor:
    """``grad @ weight`` in the dtype of ``grad``, widening a slice of the weight at a time."""
    if weight.dtype == grad.dtype:
        return grad @ weight
    result = grad.new_zeros(len(grad), weight.shape[1])
    for part in _vocabulary_slices(weight, grad.dtype):
        result.addmm_(grad[:, part], weight[part].to(grad.dtype))
    return result


def _vocabulary_slices(weight: Tensor, dtype: torch.dtype) -> list[slice]:
    """The whole vocabulary, or slices of it where the weight must be converted."""
    V = len(weight)
    if weight.dtype == dtype:
        return [slice(0, V)]
    return [slice(at, min(at + _VOCAB_SLICE, V)) for at in range(0, V, _VOCAB_SLICE)]
