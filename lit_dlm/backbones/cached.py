"""Forwards over parts of a canvas, with everything else taken from earlier forwards.

:class:`CachedCanvas` holds, for one batch, the keys and values of every column and the last raw
hidden rows of every column. A forward over a window replaces both inside the window; predictions
are then read at any columns. A column outside the window speaks with the hidden row of the last
forward that covered it, and a column that none covered yet with a zero row, whose prediction is
uniform. Which windows to run is decided elsewhere (:mod:`lit_dlm.decoding.caches`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_dlm.backbones.attention import Packing, Sequences
from lit_dlm.backbones.base import BackboneSpec, Denoised, Span
from lit_dlm.backbones.graphs import Graphs
from lit_dlm.backbones.window_cache import WindowCache, WindowPlan
from lit_dlm.ops.alignment import aligned, first_real_columns, gather_rows, raw_columns, shifted

_FEW_BLOCKS = 4
"""Blocks of a window up to which a CPU's attention takes them one by one."""
_MOST_QUERIES = 512
"""Forwards of more queries keep a GPU busy while the host launches what follows."""
_ROUND = 32
"""Queries of windows side by side are filled up to a multiple, so that few graphs serve all."""


@runtime_checkable
class WindowBackbone(Protocol):
    """A backbone that can run a window of the canvas against cached keys and values."""

    spec: BackboneSpec
    num_layers: int

    def encode_window(
        self,
        ids: Tensor,
        *,
        cache: WindowCache,
        visible: Tensor | None,
        position_ids: Tensor,
        hidden_layers: Sequence[int] = (),
        kept: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Raw hidden rows ``(B, W or K, D)`` and snapshots ``(B, W, H, D)`` of some columns."""
        ...

    @property
    def sequences_from(self) -> int | None:
        """Keys of a row from which on the attention needs no mask for rows of any lengths."""
        ...

    @property
    def replays_steps(self) -> bool:
        """Whether forwards of a few columns are to be replayed as graphs."""
        ...

    def head(self, rows: Tensor) -> Tensor:
        """Logits ``(..., V)`` of aligned hidden rows, ``-inf`` at forbidden ids."""
        ...


class CachedCanvas:
    """Keys, values and hidden rows of a batch of canvases while they are decoded.

    Args:
        backbone: the denoiser.
        num_rows: rows ``B`` of the batch.
        length: canvas columns ``L``.
        pad_mask: ``(B, L)`` bool, ``True`` on real tokens, or ``None`` without padding.
        positions: ``(B, L)`` int64 position ids.
        blocks: ``(B, L)`` int64 block of every column of a block-causal model.
        block_size: of that model.
        hidden_layers: snapshots to keep for every column.
    """

    def __init__(
        self,
        backbone: WindowBackbone,
        *,
        num_rows: int,
        length: int,
        pad_mask: Tensor | None,
        positions: Tensor,
        blocks: Tensor | None = None,
        block_size: int | None = None,
        hidden_layers: Sequence[int] = (),
    ) -> None:
        self.backbone = backbone
        self.length = length
        self.hidden_layers = tuple(hidden_layers)
        self.num_forwards = 0
        self._pad_mask = pad_mask
        self._positions = positions
        self._blocks = blocks
        self._block_size = block_size
        self._starts = None if pad_mask is None else first_real_columns(pad_mask)
        self._cache = WindowCache(length=length, num_rows=num_rows)
        self._last: Tensor | None = None  # (B, L, D)
        self._hidden: Tensor | None = None  # (B, L, H, D)
        self._graphs = Graphs(positions.device) if backbone.replays_steps else None
        if self._graphs is not None:  # of our own, to be written in place
            for name in ("_pad_mask", "_positions", "_blocks"):
                given = getattr(self, name)
                setattr(self, name, None)
                self._keep(name, given)

    def take(self, index: Tensor) -> None:
        """Keeps some rows only.

        Args:
            index: ``(n,)`` int64 rows.
        """
        self._cache.take(index)
        self._forget_graphs()
        for name in ("_pad_mask", "_positions", "_blocks", "_starts", "_last", "_hidden"):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, value[index])

    def shift(self, by: int) -> None:
        """Adds columns on the left of the canvas, or takes some away.

        Args:
            by: how many; negative where they go, which must be padding in every row.
        """
        if by == 0:
            return
        self.length += by
        self._cache.shift(by)
        self._forget_graphs()
        for name in ("_positions", "_blocks", "_last", "_hidden"):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, shifted(value, by))

    def put(
        self, index: Tensor, *, pad_mask: Tensor | None, positions: Tensor, blocks: Tensor | None
    ) -> None:
        """Other rows take the places of some, with nothing computed yet.

        Args:
            index: ``(n,)`` int64 rows.
            pad_mask: ``(B, L)`` bool of all rows, ``None`` without padding.
            positions: ``(B, L)`` int64, read in the new rows only: cached keys of the others were
                made with the position ids that these have had from the beginning.
            blocks: ``(B, L)`` int64 of all rows of a block-causal model.
        """
        self._keep("_pad_mask", pad_mask)
        self._keep("_blocks", blocks)
        self._keep("_starts", None if pad_mask is None else first_real_columns(pad_mask))
        self._keep("_positions", self._positions.index_copy(0, index, positions[index]))
        for buffer in (self._last, self._hidden):
            if buffer is not None:
                buffer[index] = 0

    def copy(self, sources: Mapping[int, int], end: int) -> None:
        """Gives rows what has been computed for others.

        Args:
            sources: rows, and the row that each is to be a copy of.
            end: columns before it are copied.
        """
        if not sources:
            return
        rows = torch.tensor([list(sources), list(sources.values())])
        to, of = rows.to(self._positions.device, non_blocking=True)
        self._cache.copy(to, of, end)
        for buffer in (self._last, self._hidden):
            if buffer is not None:
                buffer[to, :end] = buffer[of, :end]

    def _keep(self, name: str, value: Tensor | None) -> None:
        """Takes another value, in place where graphs read the old one."""
        old = getattr(self, name)
        if self._graphs is None or (old is None and value is None):
            setattr(self, name, value)
        elif old is not None and value is not None and old.shape == value.shape:
            old.copy_(value)
        else:
            own = None if value is None else value.clone(memory_format=torch.contiguous_format)
            setattr(self, name, own)
            self._graphs.clear()

    def _forget_graphs(self) -> None:
        if self._graphs is not None:
            self._graphs.clear()

    def forward(
        self,
        ids: Tensor,
        spans: Sequence[Span],
        *,
        rows: Sequence[int] | None = None,
        block_causal: bool = False,
        columns: Tensor | None = None,
    ) -> None:
        """Runs one window of each row.

        Windows of different widths run side by side as one row, so that only attention is as wide
        as the widest for all of them.

        Args:
            ids: ``(B, L)`` int64 canvas.
            spans: one window per row of the forward.
            rows: rows of the batch that take part; ``None`` means all.
            block_causal: the windows hold several blocks, and a query sees those up to its own.
            columns: ``(B, K)`` int64 columns that are read until the next forward over the same
                windows; those alone go through the end of the last layer. All by default.
        """
        form, numbers = self._form(spans, rows, block_causal)
        self._run(form, ids, numbers.to(ids.device, non_blocking=True), columns)
        self.num_forwards += 1

    def predict(
        self,
        ids: Tensor,
        spans: Sequence[Span],
        columns: Tensor,
        *,
        block_causal: bool = False,
    ) -> Denoised:
        """:meth:`forward` of all rows and :meth:`read`, replayed as a graph where that is wanted.

        The logits then hold until the next call. Arguments are those of the two.
        """
        is_small = sum(span.end - span.begin for span in spans) <= _MOST_QUERIES
        if self._graphs is None or not is_small:
            self.forward(ids, spans, block_causal=block_causal, columns=columns)
            return self.read(columns)
        form, numbers = self._form(spans, None, block_causal, is_static=True)

        def work(ids: Tensor, numbers: Tensor, columns: Tensor) -> Tensor:
            self._run(form, ids, numbers, columns)
            return self._logits(columns)

        logits = self._graphs.run(form, work, ids, numbers, columns)
        self.num_forwards += 1
        return Denoised(logits=logits, columns=columns, hidden=self._snapshots())

    def _form(
        self,
        spans: Sequence[Span],
        rows: Sequence[int] | None,
        block_causal: bool,
        *,
        is_static: bool = False,
    ) -> tuple[_Form, Tensor]:
        """What a forward looks like, and all its numbers, in one tensor on the CPU.

        Static forms do not tell one place in the canvas from another: all keys are given, the
        masks or the sequences hide what is not to be seen, and windows side by side are filled up
        to a round number of queries with copies of the last one.
        """
        widths = [span.end - span.begin for span in spans]
        width, total = max(widths), sum(widths)
        kv_end = self.length if is_static else max(span.kv_end for span in spans)
        parts = {
            "begins": [span.begin for span in spans],
            "kv_ends": [span.kv_end for span in spans],
        }
        if rows is not None:
            parts["rows"] = list(rows)
        filled = total
        if total < len(spans) * width:
            filled = -(-total // _ROUND) * _ROUND if is_static else total
            queries = [(row, at) for row, wide in enumerate(widths) for at in range(wide)]
            queries += queries[-1:] * (filled - total)
            firsts = [0, *accumulate(widths)][:-1]
            parts["windows"] = [row for row, _ in queries]
            parts["offsets"] = [at for _, at in queries]
            parts["cells"] = [min(first + at, total - 1) for first in firsts for at in range(width)]
        most = None
        sequences = self._sequences(spans, block_causal, is_static=is_static, total=filled)
        if sequences is not None:
            parts["query_starts"], parts["sequence_windows"], parts["num_keys"], most = sequences
        form = _Form(
            sizes=tuple((name, len(part)) for name, part in parts.items()),
            width=width,
            kv_end=kv_end,
            is_whole=all(span.kv_end == kv_end for span in spans),
            block_causal=block_causal,
            most=most,
        )
        return form, torch.tensor([number for part in parts.values() for number in part])

    def _run(self, form: _Form, ids: Tensor, numbers: Tensor, columns: Tensor | None) -> None:
        """A forward; looks at no value of a tensor, so that it can be recorded.

        Args:
            form: see :meth:`_form`.
            ids: ``(B, L)`` int64 canvas.
            numbers: of the form, on the device.
            columns: see :meth:`forward`.
        """
        device = ids.device
        names, lengths = zip(*form.sizes, strict=True)
        part = dict(zip(names, numbers.split(lengths), strict=True))
        begins = part["begins"][:, None]  # (n, 1)
        taken = part.get("rows")
        is_all = taken is None
        if taken is None:
            taken = torch.arange(len(begins), device=device)
        at, packing = taken[:, None], None
        if "windows" in part:
            windows, offsets = part["windows"], part["offsets"]
            at = taken[windows][None]
            packing = Packing(
                rows=at,
                cells=part["cells"].view(-1, form.width),
                windows=windows,
                offsets=offsets,
            )
        window = None  # (n, W)
        if packing is None or form.block_causal:
            window = begins + torch.arange(form.width, device=device)
        sequences = None
        if form.most is not None:
            of, num_keys = taken[part["sequence_windows"]], part["num_keys"]
            key_starts = of * self.length
            if self._starts is not None:
                key_starts = key_starts + self._starts[of]
                num_keys = (num_keys - self._starts[of]).clamp_min(1)  # padding sees something too
            end = self._cache.num_rows * self.length
            sequences = Sequences(
                query_starts=part["query_starts"].int(),
                key_starts=F.pad(key_starts, (0, 1), value=end).int(),
                num_keys=num_keys.int(),
                most_queries=form.most[0],
                most_keys=form.most[1],
            )
        visible = None
        if sequences is None:
            visible = self._visible(
                None if is_all else taken,
                window.clamp_max(self.length - 1) if form.block_causal else None,  # type: ignore[union-attr]
                None if form.is_whole else part["kv_ends"][:, None],
                form.kv_end,
            )
        places = window
        if packing is not None:
            places = (begins[packing.windows, 0] + packing.offsets)[None]
        assert places is not None
        plan = WindowPlan(
            rows=taken, columns=places, kv_end=form.kv_end, packing=packing, sequences=sequences
        )
        self._cache.plan = plan
        kept = None
        if columns is not None and packing is None and columns.shape[1] < form.width:
            read = raw_columns(columns, self.backbone.spec.shift, starts=self._starts)
            read = read if is_all else read[taken]
            # A predictor left of the window has its row of the refresh.
            kept = (read - begins).clamp(0, form.width - 1)
        last, hidden = self.backbone.encode_window(
            ids[at, places],
            cache=self._cache,
            visible=visible,
            position_ids=self._positions[at, places],
            hidden_layers=self.hidden_layers,
            kept=kept,
        )
        if self._last is None:
            self._last = self._buffer(last)
        if kept is None:
            plan.write(self._last, last)
        else:
            self._last[at, begins + kept] = last
        if hidden is not None:
            if self._hidden is None:
                self._hidden = self._buffer(hidden)
            plan.write(self._hidden, hidden)

    def _visible(
        self,
        rows: Tensor | None,
        columns: Tensor | None,
        kv_ends: Tensor | None,
        kv_end: int,
    ) -> Tensor | None:
        """Who sees whom, ``(n, 1, 1 or W, kv_end)`` bool, or ``None`` where all see all.

        Args:
            rows: ``(n,)`` rows that take part; ``None``: all.
            columns: ``(n, W)`` queries that see blocks up to their own; ``None``: all keys.
            kv_ends: ``(n, 1)`` ends of the keys that rows see, where they differ.
            kv_end: the largest of these.
        """

        def of_rows(values: Tensor) -> Tensor:
            return values if rows is None else values[rows]

        visible = None
        if self._pad_mask is not None:
            visible = of_rows(self._pad_mask)[:, None, :kv_end]
        if kv_ends is None and columns is None:
            return None if visible is None else visible[:, None]
        keys = torch.arange(kv_end, device=self._positions.device)
        if kv_ends is not None:
            before = (keys < kv_ends)[:, None]
            visible = before if visible is None else visible & before
        if columns is not None:
            assert self._blocks is not None
            blocks = of_rows(self._blocks)
            seen = blocks.gather(1, columns)[:, :, None] >= blocks[:, None, :kv_end]
            if visible is not None:
                seen = seen & visible
            # Padding may lie in a block of its own: it sees itself, since softmax needs a key.
            visible = seen | (columns[:, :, None] == keys)
        return None if visible is None else visible[:, None]

    def takes_sequences(self, spans: Sequence[Span]) -> bool:
        """Whether attention over these windows needs no mask, however different they are."""
        least = self.backbone.sequences_from
        return least is not None and max(span.kv_end for span in spans) >= least

    def _sequences(
        self, spans: Sequence[Span], block_causal: bool, *, is_static: bool, total: int
    ) -> tuple[list[int], list[int], list[int], tuple[int, int]] | None:
        """The windows of some rows as sequences, one for each block where they are block-causal.

        Returns:
            First queries (and their number), windows and keys of the sequences, and the most
            queries and keys of one; ``None`` where the attention does not take them, and on a CPU
            where they are many. Static ones are as many in every window, with empty ones.
        """
        if not self.takes_sequences(spans):
            return None
        stops = []
        for begin, end, _ in spans:
            step = self._block_size if block_causal and self._block_size else end - begin
            # A prompt's first block may be cut short on the left, a canvas's last on the right.
            whole = begin if end == self.length else end
            first = begin + step - (begin - whole) % step
            stops.append([*range(first, end, step), end])
        if (
            self._positions.device.type == "cpu"
            and not is_static
            and sum(map(len, stops)) > _FEW_BLOCKS * len(spans)
        ):
            return None
        starts, windows, seen, most_queries = [0], [], [], 0
        most_blocks = max(map(len, stops)) if is_static else 0
        for window, (begin, end, kv_end) in enumerate(spans):
            ends = stops[window] + [end] * (most_blocks - len(stops[window]))
            for start, stop in zip([begin, *ends], ends, strict=False):
                most_queries = max(most_queries, stop - start)
                starts.append(starts[-1] + stop - start)
                windows.append(window)
                seen.append(stop if block_causal else kv_end)
        most_queries += total - starts[-1]
        starts[-1] = total
        return starts, windows, seen, (most_queries, self.length if is_static else max(seen))

    def read(self, columns: Tensor) -> Denoised:
        """Predictions at some columns, from the last forward that covered each of them.

        Args:
            columns: ``(B, K)`` int64.

        Returns:
            Aligned logits ``(B, K, V)`` and, when kept, aligned snapshots ``(B, L, H, D)``.
        """
        return Denoised(logits=self._logits(columns), columns=columns, hidden=self._snapshots())

    def _logits(self, columns: Tensor) -> Tensor:
        assert self._last is not None, "read before the first forward"
        raw = raw_columns(columns, self.backbone.spec.shift, starts=self._starts)
        return self.backbone.head(gather_rows(self._last, raw))

    def _snapshots(self) -> Tensor | None:
        """``(B, L, H, D)``: the next forward writes to the buffer, but not to what is given out."""
        if self._hidden is None:
            return None
        if self.backbone.spec.shift:
            return aligned(self._hidden, self.backbone.spec.shift, starts=self._starts)
        return self._hidden.clone()

    def _buffer(self, like: Tensor) -> Tensor:
        """``(B, L, ...)`` zeros for rows ``(n, W, ...)``."""
        return like.new_zeros(self._cache.num_rows, self.length, *like.shape[2:])


@dataclass(frozen=True, kw_only=True)
class _Form:
    """What is the same in all forwards that one graph can run."""

    sizes: tuple[tuple[str, int], ...]
    """Parts of the numbers, and how many each has."""
    width: int
    """Queries of the widest window."""
    kv_end: int
    is_whole: bool
    """Whether every row sees all keys that are given."""
    block_causal: bool
    most: tuple[int, int] | None
    """Queries and keys of the longest sequence; ``None`` without sequences."""
