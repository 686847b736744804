"""Keys and values of a canvas, written through windows.

All cache schemes of masked diffusion decoding are cases of one rule: a forward over some columns
writes its keys and values there and attends to all columns before a given end. transformers' own
caches only append; here a forward may overwrite any columns of preallocated buffers, different ones
in each row.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers import Cache

from lit_dlm.backbones.attention import Packing, Sequences
from lit_dlm.ops.batches import shifted


@dataclass(frozen=True, kw_only=True)
class WindowPlan:
    """Where the next forward writes, and how far it sees."""

    rows: Tensor
    """``(n,)`` int64 rows of the buffers that take part in the forward. Unless all do, their keys
    and values are copied for attention."""
    columns: Tensor
    """``(n, W)`` int64 column that each query is written to, or ``(1, T)`` with a packing."""
    kv_end: int
    """Attention receives the keys and values of columns ``[0, kv_end)``."""
    packing: Packing | None = None
    """Where windows of different widths lie in one row of ``T`` queries."""
    sequences: Sequences | None = None
    """What each query sees, for attention without a mask, which receives whole buffers."""

    @property
    def at(self) -> Tensor:
        """Row of each query, to go with :attr:`columns`: ``(n, 1)`` or ``(1, T)``."""
        return self.rows[:, None] if self.packing is None else self.packing.rows


class WindowCache(Cache):
    """Preallocated key and value buffers for a batch of canvases.

    Writes happen in place, so this is for decoding only. Columns that were never written hold
    zeros; the attention mask must hide them. It is in no reference cycle, so that its memory is
    freed as soon as its decode ends.
    """

    plan: WindowPlan
    """Plan of the next forward; to be set before it."""

    def __init__(self, *, length: int, num_rows: int) -> None:
        super().__init__(layers=[])
        self.length = length
        self.num_rows = num_rows
        self.buffers: dict[int | str, tuple[Tensor, ...]] = {}
        """Keys and values by layer, ``(B, L, kv heads, head dim)``: a window is written in whole
        rows, and the buffers of all rows form one long sequence. By name, anything else that is
        kept for each column of a canvas, ``(B, L, ...)``."""

    def write(
        self, name: int | str, *windows: Tensor, columns: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Writes windows ``(n, W, ...)``, or ``(1, T, ...)`` with a packing; returns the buffers.

        ``columns`` ``(n, K)`` int64 replace those of the plan.
        """
        if name not in self.buffers:  # at the first write, in its dtype and on its device
            self.buffers[name] = tuple(
                new.new_zeros(self.num_rows, self.length, *new.shape[2:]) for new in windows
            )
        places = self.plan.columns if columns is None else columns
        for buffer, new in zip(self.buffers[name], windows, strict=True):
            buffer[self.plan.at, places] = new
        return self.buffers[name]

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *_args: object,
        **_kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Writes a window ``(n, h, W, d)`` or ``(1, h, T, d)``; returns what attention reads."""
        # Under autocast, rotated keys are float32; attention would round them in every forward.
        new_keys, new_values = key_states.to(value_states.dtype), value_states
        # Written first: the window's own keys are among those that it sees.
        keys, values = self.write(layer_idx, new_keys.transpose(1, 2), new_values.transpose(1, 2))
        plan = self.plan
        if plan.sequences is None:
            keys, values = keys[:, : plan.kv_end], values[:, : plan.kv_end]
            if len(plan.rows) < self.num_rows:
                keys, values = keys[plan.rows], values[plan.rows]
        return keys.transpose(1, 2), values.transpose(1, 2)

    def take(self, index: Tensor) -> None:
        """Keeps only the rows ``index``, ``(n,)`` int64."""
        self.num_rows = len(index)
        for name, buffers in self.buffers.items():
            self.buffers[name] = tuple(buffer[index] for buffer in buffers)

    def copy(self, to: Tensor, of: Tensor, end: int) -> None:
        """Copies rows ``of`` to rows ``to``, ``(n,)`` int64, in the columns before ``end``."""
        for buffers in self.buffers.values():
            for buffer in buffers:
                buffer[to, :end] = buffer[of, :end]

    def shift(self, by: int) -> None:
        """Adds ``by`` columns on the left; a negative number removes columns there."""
        self.length += by
        for name, buffers in self.buffers.items():
            self.buffers[name] = tuple(shifted(buffer, by) for buffer in buffers)
