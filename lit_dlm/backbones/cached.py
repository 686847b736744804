"""Forwards over parts of a canvas, with everything else taken from earlier forwards.

:class:`CachedCanvas` holds, for one batch, the keys and values of every column and the last raw
hidden rows of every column. A forward over a window replaces both inside the window; predictions
are then read at any columns. A column outside the window speaks with the hidden row of the last
forward that covered it, and a column that none covered yet with a zero row, whose prediction is
uniform. Which windows to run is decided elsewhere (:mod:`lit_dlm.decoding.caches`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import Cache

from lit_dlm.backbones.base import BackboneSpec, Denoised, Span
from lit_dlm.backbones.window_cache import WindowCache, WindowPlan
from lit_dlm.ops.alignment import aligned, first_real_columns, gather_aligned
from lit_dlm.ops.columns import shifted


@runtime_checkable
class WindowBackbone(Protocol):
    """A backbone that can run a window of the canvas against cached keys and values."""

    spec: BackboneSpec
    num_layers: int

    def encode_window(
        self,
        ids: Tensor,
        *,
        cache: Cache,
        visible: Tensor | None,
        position_ids: Tensor,
        hidden_layers: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """Raw hidden rows ``(B, W, D)`` and snapshots ``(B, W, H, D)`` of some columns."""
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
        hidden_layers: Sequence[int] = (),
    ) -> None:
        self.backbone = backbone
        self.length = length
        self.hidden_layers = tuple(hidden_layers)
        self.num_forwards = 0
        self._pad_mask = pad_mask
        self._positions = positions
        self._blocks = blocks
        self._cache = WindowCache(backbone.num_layers, length=length, num_rows=num_rows)
        # One column more than the canvas has: the plan writes there what is not kept.
        self._last: Tensor | None = None  # (B, L + 1, D)
        self._hidden: Tensor | None = None  # (B, L + 1, H, D)

    def take(self, index: Tensor) -> None:
        """Keeps some rows only.

        Args:
            index: ``(n,)`` int64 rows.
        """
        self._cache.take(index)
        for name in ("_pad_mask", "_positions", "_blocks", "_last", "_hidden"):
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
        self._pad_mask, self._blocks = pad_mask, blocks
        self._positions = self._positions.index_copy(0, index, positions[index])
        for buffer in (self._last, self._hidden):
            if buffer is not None:
                buffer[index] = 0

    def forward(
        self,
        ids: Tensor,
        spans: Sequence[Span],
        *,
        rows: Sequence[int] | None = None,
        block_causal: bool = False,
    ) -> None:
        """Runs one window of each row.

        Rows with different spans run together: the queries are as wide as the widest window, and
        what a row has too many is computed and not kept.

        Args:
            ids: ``(B, L)`` int64 canvas.
            spans: one window per row of the forward.
            rows: rows of the batch that take part; ``None`` means all.
            block_causal: the windows hold several blocks, and a query sees those up to its own.
        """
        device = ids.device
        index = None if rows is None else _tensor(rows, device)
        begins, ends, kv_ends = _tensor(spans, device)[:, :, None].unbind(1)  # (n, 1) each
        width = max(span.end - span.begin for span in spans)
        kv_end = max(span.kv_end for span in spans)
        columns = begins + torch.arange(width, device=device)  # (n, W)
        kept = torch.where(columns < ends, columns, self.length)
        columns = columns.clamp_max(self.length - 1)
        keys = torch.arange(kv_end, device=device)

        def of_rows(values: Tensor) -> Tensor:
            return values if index is None else values[index]

        visible = None  # broadcastable to (n, W, kv_end)
        if self._pad_mask is not None:
            visible = of_rows(self._pad_mask)[:, None, :kv_end]
        if any(span.kv_end < kv_end for span in spans):
            before = keys < kv_ends[:, None]
            visible = before if visible is None else visible & before
        if block_causal:
            assert self._blocks is not None
            blocks = of_rows(self._blocks)
            seen = blocks.gather(1, columns)[:, :, None] >= blocks[:, None, :kv_end]
            if visible is not None:
                seen = seen & visible
            # Padding may lie in a block of its own: it sees itself, since softmax needs a key.
            visible = seen | (columns[:, :, None] == keys)
        plan = WindowPlan(
            rows=torch.arange(len(ids), device=device) if index is None else index,
            columns=kept,
            kv_end=kv_end,
        )
        self._cache.plan = plan
        last, hidden = self.backbone.encode_window(
            of_rows(ids).gather(1, columns),
            cache=self._cache,
            visible=None if visible is None else visible[:, None],
            position_ids=of_rows(self._positions).gather(1, columns),
            hidden_layers=self.hidden_layers,
        )
        self.num_forwards += 1
        if self._last is None:
            self._last = self._buffer(last)
        plan.write(self._last, last)
        if hidden is not None:
            if self._hidden is None:
                self._hidden = self._buffer(hidden)
            plan.write(self._hidden, hidden)

    def read(self, columns: Tensor) -> Denoised:
        """Predictions at some columns, from the last forward that covered each of them.

        Args:
            columns: ``(B, K)`` int64.

        Returns:
            Aligned logits ``(B, K, V)`` and, when kept, aligned snapshots ``(B, L, H, D)``.
        """
        assert self._last is not None, "read before the first forward"
        shift = self.backbone.spec.shift
        starts = None
        if shift and self._pad_mask is not None:
            starts = first_real_columns(self._pad_mask)
        rows = gather_aligned(self._last, columns, shift, starts=starts)
        hidden = None
        if self._hidden is not None:
            # The buffer changes with the next forward; what is handed out must not.
            hidden = self._hidden[:, : self.length]
            hidden = aligned(hidden, shift, starts=starts) if shift else hidden.clone()
        return Denoised(logits=self.backbone.head(rows), columns=columns, hidden=hidden)

    def _buffer(self, like: Tensor) -> Tensor:
        """``(B, L + 1, ...)`` zeros for rows ``(n, W, ...)``."""
        return like.new_zeros(self._cache.num_rows, self.length + 1, *like.shape[2:])


def _tensor(values: Sequence[int] | Sequence[Span], device: torch.device) -> Tensor:
    """Small integers on the device, without waiting for it."""
    return torch.tensor(values, dtype=torch.long).to(device, non_blocking=True)
