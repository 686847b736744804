"""Keys and values of a canvas, written through windows.

All cache schemes of masked diffusion decoding are cases of one rule: a forward over some columns
writes its keys and values there and attends to the columns before an end. transformers' own caches
only append; here a forward may overwrite any columns of preallocated buffers, other ones in each
row.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from lit_dlm.backbones.attention import Packing, Sequences
from lit_dlm.ops.alignment import shifted


@dataclass(frozen=True, kw_only=True)
class WindowPlan:
    """Where the next forward writes, and how far it sees."""

    rows: Tensor
    """``(n,)`` int64 rows of the buffers that the forward consists of. Where they are not all, the
    keys and values of these rows are copied for attention."""
    columns: Tensor
    """``(n, W)`` int64 columns that each query is written to, or ``(1, T)`` with a packing."""
    kv_end: int
    """Keys and values of columns ``[0, kv_end)`` are given to attention."""
    packing: Packing | None = None
    """Where windows of different widths lie, ``T`` queries in all in one row."""
    sequences: Sequences | None = None
    """What each query sees, for the attention that needs no mask: it is given whole buffers."""

    def write(self, buffer: Tensor, new: Tensor) -> None:
        """Writes a window into a buffer, in place.

        Args:
            buffer: ``(B, L, ...)``.
            new: ``(n, W, ...)``, or ``(1, T, ...)`` with a packing.
        """
        rows = self.rows[:, None] if self.packing is None else self.packing.rows
        buffer[rows, self.columns] = new


class WindowCache(Cache):
    """Preallocated key and value buffers for a batch of canvases.

    Writes happen in place, so this is for decoding only. Columns that were never written hold
    zeros; the attention mask must hide them.
    """

    plan: WindowPlan
    """Of the next forward; to be set before it."""

    def __init__(self, num_layers: int, *, length: int, num_rows: int) -> None:
        """Buffers are allocated at the first write.

        Args:
            num_layers: decoder layers.
            length: canvas columns ``L``.
            num_rows: rows of the batch.
        """
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

    def copy(self, to: Tensor, of: Tensor, end: int) -> None:
        """Makes rows copies of others.

        Args:
            to: ``(n,)`` int64 rows of the buffers that change.
            of: ``(n,)`` int64 rows that are copied.
            end: columns before it are copied.
        """
        for layer in self._window_layers:
            if layer.keys is not None and layer.values is not None:
                layer.keys[to, :, :end] = layer.keys[of, :, :end]
                layer.values[to, :, :end] = layer.values[of, :, :end]

    def shift(self, by: int) -> None:
        """Adds columns on the left, or takes some away.

        Args:
            by: how many; negative where they go.
        """
        self.length += by
        for layer in self._window_layers:
            if layer.keys is not None and layer.values is not None:
                layer.keys = shifted(layer.keys.transpose(1, 2), by).transpose(1, 2)
                layer.values = shifted(layer.values.transpose(1, 2), by).transpose(1, 2)


class _WindowLayer(CacheLayerMixin):
    """One decoder layer's buffers, ``(B, kv heads, L, head dim)`` each, heads innermost in memory.

    So a window is written in whole rows, and the buffers of all rows are one long sequence.
    """

    def __init__(self, cache: WindowCache) -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates the buffers in the dtype and on the device of the first forward."""
        size = (self._cache.num_rows, self._cache.length, key_states.shape[1])
        self.keys = key_states.new_zeros(*size, key_states.shape[3]).transpose(1, 2)
        self.values = value_states.new_zeros(*size, value_states.shape[3]).transpose(1, 2)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes a window ``(n, h, W, d)``, or ``(1, h, T, d)`` with a packing.

        Returns:
            Keys and values that attention sees, ``(n, h, kv_end, d)``; of sequences all of them.
        """
        # Under autocast rotated keys are float32; attention would round them in every forward.
        key_states = key_states.to(value_states.dtype)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        plan = self._cache.plan
        plan.write(self.keys.transpose(1, 2), key_states.transpose(1, 2))
        plan.write(self.values.transpose(1, 2), value_states.transpose(1, 2))
        if plan.sequences is not None:
            return self.keys, self.values
        keys, values = self.keys[:, :, : plan.kv_end], self.values[:, :, : plan.kv_end]
        if len(plan.rows) < self._cache.num_rows:
            keys, values = keys[plan.rows], values[plan.rows]
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys attention gets, and the column of the first one."""
        del query_length
        return self._cache.plan.kv_end, 0

    def get_seq_length(self) -> int:
        """Read only where position ids are not given, which they always are."""
        return 0

    def get_max_length(self) -> int:
        """Columns of the buffers."""
        return self._cache.length
