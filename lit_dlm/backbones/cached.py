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

from lit_dlm.backbones.base import BackboneSpec, Denoised
from lit_dlm.backbones.block import Span
from lit_dlm.backbones.window_cache import WindowCache, WindowPlan, write_window
from lit_dlm.ops.alignment import aligned, first_real_columns, gather_aligned


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
        self._last: Tensor | None = None  # (B, L, D)
        self._hidden: Tensor | None = None  # (B, L, H, D)

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

    def forward(
        self,
        ids: Tensor,
        spans: Sequence[Span],
        *,
        rows: Sequence[int] | None = None,
        block_causal: bool = False,
    ) -> None:
        """Runs one window of each row.

        Rows with different spans run together: the window is as wide as the widest one, and the
        columns that it has too many change nothing.

        Args:
            ids: ``(B, L)`` int64 canvas.
            spans: one window per row of the forward.
            rows: rows of the batch that take part; ``None`` means all.
            block_causal: the windows hold several blocks, and a query sees those up to its own.
        """
        device = ids.device
        kv_end = max(span.kv_end for span in spans)
        index = None if rows is None else _tensor(rows, device)
        same = all(span == spans[0] for span in spans)
        width = max(span.end - span.begin for span in spans)
        start = min(max(span.end - width, 0) for span in spans)
        columns, written = None, None
        if not same:
            begins = _tensor([span.begin for span in spans], device)[:, None]
            ends = _tensor([span.end for span in spans], device)[:, None]
            # Windows share their right edge, so that none leaves the canvas.
            columns = (ends - width).clamp_min(0) + torch.arange(width, device=device)  # (n, W)
            written = (columns >= begins) & (columns < ends)

        def window(values: Tensor) -> Tensor:
            values = values if index is None else values[index]
            if columns is None:
                return values[:, start : start + width]
            return values.gather(1, columns)

        visible = self._visible(spans, index, kv_end, device)
        if block_causal:
            assert self._blocks is not None
            keys = self._blocks if index is None else self._blocks[index]
            seen = window(self._blocks)[:, :, None] >= keys[:, None, :kv_end]  # (n, W, kv_end)
            if visible is not None:
                seen = seen & visible[:, 0]
            at = torch.arange(start, start + width, device=device) if columns is None else columns
            # Padding may lie in a block of its own: it sees itself, since softmax needs a key.
            itself = at[..., :, None] == torch.arange(kv_end, device=device)
            visible = (seen | itself)[:, None]
        plan = WindowPlan(start=start, kv_end=kv_end, rows=index, columns=columns, written=written)
        self._cache.plan = plan
        last, hidden = self.backbone.encode_window(
            window(ids),
            cache=self._cache,
            visible=visible,
            position_ids=window(self._positions),
            hidden_layers=self.hidden_layers,
        )
        self.num_forwards += 1
        self._last = self._kept(self._last, last[:, :, None], plan)
        if hidden is not None:
            self._hidden = self._kept(self._hidden, hidden, plan)

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
        rows = gather_aligned(self._last[:, :, 0], columns, shift, starts=starts)
        hidden = None
        if self._hidden is not None:
            # The buffer changes with the next forward; what is handed out must not.
            hidden = aligned(self._hidden, shift, starts=starts) if shift else self._hidden.clone()
        return Denoised(logits=self.backbone.head(rows), columns=columns, hidden=hidden)

    def _visible(
        self, spans: Sequence[Span], index: Tensor | None, kv_end: int, device: torch.device
    ) -> Tensor | None:
        """``(n, 1, 1, kv_end)`` bool keys of each row, or ``None`` when all are seen."""
        visible = None
        if self._pad_mask is not None:
            visible = self._pad_mask if index is None else self._pad_mask[index]
            visible = visible[:, :kv_end]
        if any(span.kv_end < kv_end for span in spans):
            limits = _tensor([span.kv_end for span in spans], device)
            before = torch.arange(kv_end, device=device) < limits[:, None]
            visible = before if visible is None else visible & before
        return None if visible is None else visible[:, None, None, :]

    def _kept(self, buffer: Tensor | None, new: Tensor, plan: WindowPlan) -> Tensor:
        """Writes ``(n, W, H, D)`` rows into a ``(B, L, H, D)`` buffer, made at the first use."""
        if buffer is None:
            buffer = new.new_zeros(self._cache.num_rows, self.length, *new.shape[2:])
        write_window(buffer.transpose(1, 2), new.transpose(1, 2), plan)
        return buffer


def _tensor(values: Sequence[int], device: torch.device) -> Tensor:
    """Small integers on the device, without waiting for it."""
    return torch.tensor(values, dtype=torch.long).to(device, non_blocking=True)
