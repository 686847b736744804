"""Keys and values of a canvas, written through windows.

All cache schemes of masked diffusion decoding are cases of one rule: a forward over some columns
writes its keys and values there and attends to the columns before an end. transformers' own caches
only append; here a forward may overwrite any columns of preallocated buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin


@dataclass(frozen=True, kw_only=True)
class WindowPlan:
    """Where the next forward writes, and how far it sees."""

    start: int
    """First column that is written; with ``columns`` the smallest one."""
    kv_end: int
    """Keys and values of columns ``[0, kv_end)`` are given to attention."""
    rows: Tensor | None = None
    """``(n,)`` int64 rows of the buffers that the forward consists of; ``None``: all."""
    columns: Tensor | None = None
    """``(n, W)`` int64 columns of each row, ascending; ``None``: ``start, start + 1, ...``."""
    written: Tensor | None = None
    """``(n, W)`` bool columns that are written; the others keep what they hold. ``None``: all."""


class WindowCache(Cache):
    """Preallocated key and value buffers for a batch of canvases.

    Writes happen in place, so this is for decoding only. Columns that were never written hold
    zeros; the attention mask must hide them.
    """

    def __init__(self, num_layers: int, *, length: int, num_rows: int) -> None:
        """Buffers are allocated at the first write.

        Args:
            num_layers: decoder layers.
            length: canvas columns ``L``.
            num_rows: rows of the batch.
        """
        self.plan = WindowPlan(start=0, kv_end=length)
        self.length = length
        self.num_rows = num_rows
        self._window_layers = [_WindowLayer(self) for _ in range(num_layers)]
        super().__init__(layers=[*self._window_layers])

    def take(self, index: Tensor) -> None:
        """Keeps some rows only.

        Args:
            index: ``(n,)`` int64 rows of the buffers.
        """
        self.num_rows = len(index)
        for layer in self._window_layers:
            if layer.keys is not None and layer.values is not None:
                layer.keys = layer.keys[index]
                layer.values = layer.values[index]


class _WindowLayer(CacheLayerMixin):
    """One decoder layer's buffers, ``(B, kv heads, L, head dim)`` each."""

    def __init__(self, cache: WindowCache) -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates the buffers in the dtype and on the device of the first forward."""
        size = (self._cache.num_rows, key_states.shape[1], self._cache.length)
        self.keys = key_states.new_zeros(*size, key_states.shape[3])
        self.values = value_states.new_zeros(*size, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes a window ``(n, h, W, d)``; returns what attention sees, ``(n, h, kv_end, d)``."""
        # Under autocast rotated keys are float32; attention would round them in every forward.
        key_states = key_states.to(value_states.dtype)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        plan = self._cache.plan
        write_window(self.keys, key_states, plan)
        write_window(self.values, value_states, plan)
        keys, values = self.keys, self.values
        if plan.rows is not None:
            keys, values = keys[plan.rows], values[plan.rows]
        return keys[:, :, : plan.kv_end], values[:, :, : plan.kv_end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys attention gets, and the column of the first one."""
        del query_length
        return self._cache.plan.kv_end, 0

    def get_seq_length(self) -> int:
        """The column of the first query."""
        return self._cache.plan.start

    def get_max_length(self) -> int:
        """Columns of the buffers."""
        return self._cache.length


def write_window(buffer: Tensor, new: Tensor, plan: WindowPlan) -> None:
    """Writes a window into a buffer, in place.

    Args:
        buffer: ``(B, h, L, d)``.
        new: ``(n, h, W, d)``.
        plan: where it goes.
    """
    if plan.columns is None and plan.rows is None:
        buffer[:, :, plan.start : plan.start + new.shape[2]] = new
        return
    rows, columns = plan.rows, plan.columns
    if rows is None:
        rows = torch.arange(len(buffer), device=buffer.device)
    if columns is None:
        columns = torch.arange(plan.start, plan.start + new.shape[2], device=buffer.device)
        columns = columns.expand(len(rows), -1)
    at = rows[:, None], slice(None), columns  # indexes as (n, W, h, d)
    values = new.transpose(1, 2)
    if plan.written is not None:
        values = torch.where(plan.written[..., None, None], values, buffer[at])
    buffer[at] = values
