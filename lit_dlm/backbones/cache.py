"""Forwards over parts of a canvas, with everything else taken from earlier forwards.

All cache schemes of masked diffusion decoding are cases of one rule: a forward over some columns
writes its keys and values there and attends to all columns before a given end. transformers' own
caches only append; here a forward may overwrite any columns of preallocated buffers, different ones
in each row.

:class:`CachedCanvas` holds, for one batch, the keys and values of every column and the last raw
hidden row of every column. A forward over a window replaces both inside the window; predictions
can then be read at any column. Outside the window they come from the hidden row of the last forward
that covered the column or, if none has yet, from a zero row, whose prediction is uniform. Which
windows to run is decided elsewhere (:mod:`lit_dlm.decoding.caches`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import accumulate, chain, pairwise
from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache

from lit_dlm.backbones.attention import Packing, Sequences
from lit_dlm.backbones.base import Backbone, Denoised, Span
from lit_dlm.backbones.visibility import aligned, first_column, raw_columns
from lit_dlm.tensors.batches import gather_rows, shifted

_LAST, _HIDDEN = "last hidden rows", "snapshots"
"""Names of further buffers: raw ``(B, L, D)`` after the final norm, snapshots ``(B, L, H, D)``."""
_FEW_BLOCKS = 4
"""Most blocks of a window that attention takes one by one. If there are more, as in a prompt, each
would fill only a small part of a kernel's tile; under one mask they fill it together."""
MOST_TOKENS = 4096
"""Most queries of a padded forward: with more, a GPU computes for longer than a host launches."""


class Bucket(NamedTuple):
    """Sizes of a padded plan. Forwards of one bucket differ in values only, not in shapes."""

    sizes: tuple[tuple[str, int], ...]
    """How many numbers of each kind describe the plan, in their order."""
    most_queries: int
    """Bound on the queries of a sequence."""


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
    visible: Tensor | None = None
    """Which of these columns each query sees, ``(n, 1, 1 or W, kv_end)`` bool; ``None`` if all."""
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
        # Only then are a layer's sizes known, and layers that never write take no memory.
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
        # Smaller buffers: beside rows that have left, each layer's attention would copy the others.
        self.num_rows = len(index)
        for name, buffers in self.buffers.items():
            self.buffers[name] = tuple(buffer[index] for buffer in buffers)

    def shift(self, by: int) -> None:
        """Adds ``by`` columns on the left; a negative number removes columns there."""
        self.length += by
        for name, buffers in self.buffers.items():
            self.buffers[name] = tuple(shifted(buffer, by) for buffer in buffers)


@runtime_checkable
class CacheableBackbone(Backbone, Protocol):
    """A backbone whose layers can run over a part of a canvas, against cached keys and values."""

    @property
    def sequences_from(self) -> int | None:
        """Number of keys from which attention takes sequences instead of a mask, if it can."""
        ...

    def encode(
        self,
        ids: Tensor,
        visible: Tensor | None,
        position_ids: Tensor | None,
        *,
        hidden_layers: Sequence[int] = (),
        cache: WindowCache | None = None,
        kept: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the layers, as :meth:`lit_dlm.backbones.hf.HFBackbone.encode` says."""
        ...

    def head(self, rows: Tensor) -> Tensor:
        """``(..., V)`` logits of rows ``(..., D)`` after the final norm."""
        ...


@dataclass(eq=False)
class CachedCanvas:
    """Keys, values and hidden rows of a batch of canvases while they are decoded."""

    backbone: CacheableBackbone
    _: KW_ONLY
    pad_mask: Tensor | None
    """``(B, L)`` bool, ``True`` on real tokens, or ``None`` without padding."""
    positions: Tensor
    """``(B, L)`` int64 position ids."""
    blocks: Tensor | None = None
    """``(B, L)`` int64 block of every column, for a block-causal model."""
    hidden_layers: Sequence[int] = ()
    """Snapshots to keep for every column."""
    is_padded: bool = False
    """Whether plans may be padded: buffers then have one column more, which is never seen."""

    def __post_init__(self) -> None:
        num_rows, length = self.positions.shape
        self._starts = None if self.pad_mask is None else first_column(self.pad_mask)
        self._cache = WindowCache(length=length + self.is_padded, num_rows=num_rows)
        self._read_hidden: Tensor | None = None

    def take(self, index: Tensor) -> None:
        """Keeps only the rows ``index``, ``(n,)`` int64."""
        self._cache.take(index)
        self.positions = self.positions[index]
        if self.blocks is not None:
            self.blocks = self.blocks[index]
        if self.pad_mask is not None and self._starts is not None:
            self.pad_mask, self._starts = self.pad_mask[index], self._starts[index]

    def shift(self, by: int) -> None:
        """Adds ``by`` columns on the left of the canvas; a negative number removes padding."""
        if by == 0:
            return
        self._cache.shift(by)
        # Blocks and padding of all rows come with the new rows, see put().
        self.positions = shifted(self.positions, by)

    def put(
        self, index: Tensor, *, pad_mask: Tensor | None, positions: Tensor, blocks: Tensor | None
    ) -> None:
        """Replaces the rows ``index`` ``(n,)`` with new ones, for which nothing is computed yet.

        The rest is ``(B, L)`` for all rows. Position ids are read in the new rows only: the others
        keep those with which their cached keys were made.
        """
        self.pad_mask = pad_mask
        # Starts and blocks move with the canvas, which may have grown on the left. Otherwise all
        # stay where they are, as recorded forwards read them there.
        self.blocks = _in_place(self.blocks, blocks)
        starts = None if pad_mask is None else first_column(pad_mask)
        self._starts = _in_place(self._starts, starts)
        self.positions.index_copy_(0, index, positions[index])
        # Predictions of the old row would be read as the new one's. Old keys need no care: no
        # window sees columns that were not written anew.
        for name in (_LAST, _HIDDEN):
            for buffer in self._cache.buffers.get(name, ()):
                buffer.index_fill_(0, index, 0)

    def copy(self, sources: Mapping[int, int], end: int) -> None:
        """Copies columns before ``end`` between rows; ``sources`` maps targets to their sources."""
        # One transfer for both, which the host does not wait for.
        rows = torch.tensor([list(sources), list(sources.values())])
        to, of = rows.to(self.positions.device, non_blocking=True)
        for buffer in chain(*self._cache.buffers.values()):
            buffer[to, :end] = buffer[of, :end]

    def run(self, ids: Tensor, plan: WindowPlan, *, columns: Tensor | None = None) -> None:
        """Runs a planned forward.

        Args:
            ids: ``(B, L)`` int64 canvas.
            columns: ``(B, K)`` int64 columns that will be read before the next forward over the
                same windows; only these go through the end of the last layer. All by default.
        """
        self._cache.plan = plan
        # With a packing, offsets differ from window to window: then all rows are kept.
        places, kept = plan.columns, None
        begins, width = places[:, :1], places.shape[1]
        # Padding computes some token, whichever, and writes to the column behind the canvas.
        of = places.clamp_max(self.positions.shape[1] - 1) if self.is_padded else places
        if columns is not None and plan.packing is None and columns.shape[1] < width:
            read = raw_columns(columns, self.backbone.spec.shift, starts=self._starts)
            read = read if len(plan.rows) == self._cache.num_rows else read[plan.rows]
            # A predictor left of the window keeps its row from the refresh.
            kept = (read - begins).clamp(0, width - 1)
        last, hidden = self.backbone.encode(
            ids[plan.at, of],
            plan.visible,
            self.positions[plan.at, of],
            hidden_layers=self.hidden_layers,
            cache=self._cache,
            kept=kept,
        )
        # Columns that are not read keep rows of an earlier forward.
        self._cache.write(_LAST, last, columns=None if kept is None else begins + kept)
        if hidden is not None:
            self._cache.write(_HIDDEN, hidden)

    def plan(
        self,
        spans: Sequence[Span],
        *,
        rows: Sequence[int] | None = None,
        block_causal: bool = False,
    ) -> WindowPlan:
        """Plans one window of each row; if widths differ, only attention pads to the widest.

        Args:
            rows: rows of the batch that take part, one for each window; ``None`` means all.
            block_causal: the windows hold several blocks, and a query sees those up to its own.
        """
        # Up to the transfer all is arithmetic on the host, where shapes must be known anyway.
        widths = [span.end - span.begin for span in spans]
        width, kv_end = max(widths), max(span.kv_end for span in spans)
        # Equal widths are the usual case, where a grid is the packing already.
        is_packed = sum(widths) < len(spans) * width
        ranges = self._ranges(spans, block_causal)
        # All numbers go to the device together: separately, each would take a launch of its own.
        numbers: dict[str, Sequence[int]] = {
            "rows": range(len(spans)) if rows is None else rows,
            "begins": [span.begin for span in spans],
            "kv_ends": [span.kv_end for span in spans],
        }
        numbers |= (_packing_numbers(widths) if is_packed else {}) | (ranges or {})
        part = _on_device(numbers, self.positions.device)
        taken, begins = part["rows"], part["begins"][:, None]  # (n,) and (n, 1)
        window = begins + torch.arange(width, device=begins.device)  # (n, W)
        places, packing = window, None
        # Rows of different widths lie side by side, so that only attention pads: the layers'
        # products, which cost more, do not compute padding.
        if is_packed:
            windows, offsets = part["windows"], part["offsets"]
            places = (begins[windows, 0] + offsets)[None]
            cells = part["cells"].view(-1, width)
            packing = Packing(
                rows=taken[windows][None], cells=cells, windows=windows, offsets=offsets
            )
        sequences = visible = None
        if ranges is None:
            is_whole = all(span.kv_end == kv_end for span in spans)
            visible = self._visible(
                None if rows is None else taken,
                # Past the canvas there are only cells of a grid that are dropped.
                window.clamp_max(self.positions.shape[1] - 1) if block_causal else None,
                None if is_whole else part["kv_ends"][:, None],
                kv_end,
            )
        else:
            # From the host's numbers: reading the device's would make the host wait.
            sequences = self._sequences(
                part,
                most_queries=max(stop - first for first, stop in pairwise(ranges["query_starts"])),
                most_keys=max(ranges["num_keys"]),
            )
        return WindowPlan(
            rows=taken,
            columns=places,
            kv_end=kv_end,
            packing=packing,
            visible=visible,
            sequences=sequences,
        )

    def bucketed(
        self, spans: Sequence[Span], *, rows: Sequence[int], block_causal: bool
    ) -> tuple[Bucket, list[int]] | None:
        """Describes a padded plan, ``None`` if it needs a mask or more than :data:`MOST_TOKENS`."""
        ranges = self._ranges(spans, block_causal)
        widths = [span.end - span.begin for span in spans]
        total = sum(widths)
        # At most an eighth of the queries are padding, or seven.
        tokens = -(-total // (step := max(8, 2 ** (total.bit_length() - 4)))) * step
        if ranges is None or tokens > MOST_TOKENS:
            return None
        slots, num_padding = self._cache.num_rows, tokens - total
        # One sequence holds the padding. Those after it are empty.
        sequences = -(-len(ranges["of"]) // slots) * slots + 1
        more = sequences - len(ranges["of"])
        most = max(stop - first for first, stop in pairwise([*ranges["query_starts"], tokens]))
        queries = [(window, at) for window, wide in enumerate(widths) for at in range(wide)]
        no_windows = slots + 1 - len(spans)
        numbers = {
            "rows": [*rows, *[0] * no_windows],
            "begins": [*(span.begin for span in spans), *[self.positions.shape[1]] * no_windows],
            "windows": [*(window for window, _ in queries), *[slots] * num_padding],
            "offsets": [*(at for _, at in queries), *[0] * num_padding],
            "query_starts": [*ranges["query_starts"], *[tokens] * more],
            "of": [*ranges["of"], *[slots] * more],
            "num_keys": [*ranges["num_keys"], *[1] * more],
        }
        sizes = tuple((name, len(part)) for name, part in numbers.items())
        # A bound that is a power of two keeps the number of buckets small.
        return Bucket(sizes, 1 << (most - 1).bit_length()), list(chain(*numbers.values()))

    def plan_of(self, bucket: Bucket, numbers: Tensor) -> WindowPlan:
        """Returns the plan that numbers ``(n,)`` int64 of :meth:`bucketed`, and more, describe."""
        names, sizes = zip(*bucket.sizes, strict=True)
        part = dict(zip(names, numbers[: sum(sizes)].split(sizes), strict=True))
        windows, offsets = part["windows"], part["offsets"]
        # No grid: with sequences, attention takes the queries as they are packed.
        packing = Packing(
            rows=part["rows"][windows][None], cells=windows[:0], windows=windows, offsets=offsets
        )
        return WindowPlan(
            rows=part["rows"],
            columns=(part["begins"][windows] + offsets)[None],
            kv_end=self.positions.shape[1],
            packing=packing,
            sequences=self._sequences(
                part, most_queries=bucket.most_queries, most_keys=self.positions.shape[1]
            ),
        )

    def _sequences(
        self, part: Mapping[str, Tensor], *, most_queries: int, most_keys: int
    ) -> Sequences:
        """Returns the sequences of :meth:`_ranges`, by its numbers on the device."""
        of, num_keys = part["rows"][part["of"]], part["num_keys"]
        # The buffers of all rows form one long sequence of keys; left padding is skipped.
        # Rows keep their place in the buffers however far they have got, so a start is a product.
        key_starts = of * self._cache.length
        if self._starts is not None:
            key_starts = key_starts + self._starts[of]
            num_keys = (num_keys - self._starts[of]).clamp_min(1)  # padding must see something, too
        end = self._cache.num_rows * self._cache.length
        return Sequences(
            query_starts=part["query_starts"].int(),
            key_starts=F.pad(key_starts, (0, 1), value=end).int(),
            num_keys=num_keys.int(),
            most_queries=most_queries,
            most_keys=most_keys,
        )

    def _visible(
        self, rows: Tensor | None, columns: Tensor | None, kv_ends: Tensor | None, kv_end: int
    ) -> Tensor | None:
        """Returns who sees whom, ``(n, 1, 1 or W, kv_end)`` bool, ``None`` if all see all.

        With ``columns`` ``(n, W)``, queries see blocks up to their own, else all keys; ``kv_ends``
        ``(n, 1)`` are where these end, if that differs between rows.
        """
        taken = slice(None) if rows is None else rows
        visible = None if self.pad_mask is None else self.pad_mask[taken, None, :kv_end]
        # All queries see the same keys: one row of a mask will do, and none without padding.
        if kv_ends is None and columns is None:
            return None if visible is None else visible[:, None]
        keys = torch.arange(kv_end, device=self.positions.device)
        if kv_ends is not None:
            before = (keys < kv_ends)[:, None]
            visible = before if visible is None else visible & before
        if columns is not None:
            assert self.blocks is not None
            blocks = self.blocks[taken]
            seen = blocks.gather(1, columns)[:, :, None] >= blocks[:, None, :kv_end]
            if visible is not None:
                seen = seen & visible
            # Padding may be in a block of its own: it sees itself, since softmax needs a key.
            visible = seen | (columns[:, :, None] == keys)
        return None if visible is None else visible[:, None]

    def takes_sequences(self, spans: Sequence[Span]) -> bool:
        """Whether attention over these windows needs no mask, however much they differ."""
        least = self.backbone.sequences_from
        return least is not None and max(span.kv_end for span in spans) >= least

    def _ranges(self, spans: Sequence[Span], block_causal: bool) -> dict[str, list[int]] | None:
        """Describes windows as sequences, one for each window or, if block-causal, for each block.

        Returns the first query of each sequence (and the number of all queries), its window and its
        number of keys; ``None`` where attention takes a mask.
        """
        # Of causal tokens each would be a sequence.
        is_causal = block_causal and self.backbone.spec.causal_context
        if is_causal or not self.takes_sequences(spans):
            return None
        starts, windows, num_keys = [0], [], []
        for window, (begin, end, kv_end) in enumerate(spans):
            step = (self.backbone.spec.block_size if block_causal else None) or end - begin
            # A prompt's first block may be cut short on the left, a canvas's last on the right.
            whole = begin if end == self.positions.shape[1] else end
            first = begin + step - (begin - whole) % step
            for start, stop in pairwise([begin, *range(first, end, step), end]):
                starts.append(starts[-1] + stop - start)
                windows.append(window)
                # The last block of a window may see keys behind it: a step within a block does.
                num_keys.append(stop if block_causal and stop < end else kv_end)
        if len(windows) > _FEW_BLOCKS * len(spans):
            return None
        return {"query_starts": starts, "of": windows, "num_keys": num_keys}

    def read(self, columns: Tensor) -> Denoised:
        """Predicts columns ``(B, K)`` int64 from the last forward that covered each of them.

        Returns aligned logits ``(B, K, V)`` and, if kept, aligned snapshots ``(B, L, H, D)``.
        """
        shift, buffers = self.backbone.spec.shift, self._cache.buffers
        # The row that predicts a column may come from an earlier forward than the column's own.
        raw = raw_columns(columns, shift, starts=self._starts)
        (last,) = buffers[_LAST]
        logits = self.backbone.head(gather_rows(last, raw))
        hidden = None
        if _HIDDEN in buffers:  # copied: the next forward changes the buffer
            hidden = buffers[_HIDDEN][0][:, : self.positions.shape[1]]
            hidden = aligned(hidden, shift, starts=self._starts) if shift else hidden.clone()
            if self.is_padded:  # a graph keeps its results: those of all lie in one place
                hidden = self._read_hidden = _in_place(self._read_hidden, hidden)
        return Denoised(logits=logits, columns=columns, hidden=hidden)


def _in_place(memory: Tensor | None, values: Tensor | None) -> Tensor | None:
    """Returns values, in the memory of those before them if they have the same shape."""
    if memory is None or values is None or memory.shape != values.shape:
        return values
    return memory.copy_(values)


def _packing_numbers(widths: Sequence[int]) -> dict[str, Sequence[int]]:
    """Returns window and offset of each packed query, and the query in each cell of the grid."""
    total, width = sum(widths), max(widths)
    queries = [(row, at) for row, wide in enumerate(widths) for at in range(wide)]
    firsts = list(accumulate(widths, initial=0))[:-1]
    return {
        "windows": [row for row, _ in queries],
        "offsets": [at for _, at in queries],
        "cells": [min(first + at, total - 1) for first in firsts for at in range(width)],
    }


def _on_device(numbers: Mapping[str, Sequence[int]], device: torch.device) -> dict[str, Tensor]:
    """Returns the numbers as int64 tensors, by one transfer that the host does not wait for."""
    together = torch.tensor([number for part in numbers.values() for number in part])
    parts = together.to(device, non_blocking=True).split([len(part) for part in numbers.values()])
    return dict(zip(numbers, parts, strict=True))
