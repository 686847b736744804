"""The most probable token of every row and its probability.

On the CPU torch's arg-max over a vocabulary takes twice as long as its softmax, since only the
maximum itself is vectorised; here it costs little beside the softmax.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lit_dlm.ops.scores import confidence

_BLOCK = 256


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Arg-max and its softmax probability.

    Args:
        logits: ``(..., V)`` floating point.

    Returns:
        ``(...)`` int64 ids, of the lowest of several equal ones, and ``(...)`` probabilities in the
        dtype of ``logits``, float32 at least.
    """
    if logits.device.type == "cpu":
        rows = logits.reshape(-1, logits.shape[-1])
        ids = _first_arg_max(rows).reshape(logits.shape[:-1])
    else:
        ids = logits.argmax(-1)
    return ids, confidence(logits, ids)


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
