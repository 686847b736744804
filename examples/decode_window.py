"""A decode window of your own, without a base class: blocks whose length doubles.

In the folder of this file, the YAML of a decoder (``lit-dlm generate TEXT --config FILE``) says::

    policy: {class_path: ThresholdPolicy, init_args: {threshold: 0.9}}
    quota: NoQuota
    window: {class_path: decode_window.DoublingWindow, init_args: {first_length: 4}}
    cache: PrefixCache
"""

from __future__ import annotations

from bisect import bisect

import torch

from lit_dlm.decoding import DecodeState
from lit_dlm.decoding.windows import WindowView


class DoublingWindow:
    """Goes through blocks, each twice as long as the one before it; the response ends the last.

    Args:
        first_length: cells of the first block.
    """

    def __init__(self, first_length: int = 4) -> None:
        self.first_length = first_length

    def view(self, state: DecodeState) -> WindowView:
        """Returns where each row may commit in this step, and the columns to predict."""
        L, device = state.ids.shape[1], state.ids.device
        edges = torch.tensor(self._edges(state.start, L), device=device)
        leftmost = state.unfinished.int().argmax(1, keepdim=True)  # (b, 1)
        block = ((leftmost >= edges).sum(1) - 1).clamp_min(0)  # a row may have no masks left
        begin, end = edges[block][:, None], edges[block + 1][:, None]
        columns = torch.arange(L, device=device)
        longest = int((end - begin).max())
        return WindowView(
            candidates=state.masked & (columns < end),  # nothing is masked before the block
            columns=(begin + columns[:longest]).minimum(end - 1),
            block=block,
            num_blocks=len(edges) - 1,
        )

    def bounds(self, column: int, *, start: int, length: int, first: int) -> tuple[int, int]:
        """Returns first column and end of the block that a column is in, for caches."""
        edges = self._edges(start, length)
        number = bisect(edges, column) - 1
        return edges[number], edges[number + 1]

    def _edges(self, start: int, length: int) -> list[int]:
        """First columns of the blocks, then the end of the canvas."""
        edges, size = [start], self.first_length
        while edges[-1] + size < length:
            edges.append(edges[-1] + size)
            size *= 2
        return [*edges, length]
