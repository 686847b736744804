"""The most probable token of every row.

On the CPU torch's arg-max over a vocabulary takes twice as long as its softmax, since only the
maximum itself is vectorised; here it costs little beside the softmax.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 256


def arg_max(logits: Tensor) -> Tensor:
    """``(...)`` int64: the most probable token of ``(..., V)`` logits, the lowest of equals."""
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
