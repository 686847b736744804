"""Windows: where a step may commit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from lit_dlm.decoding.state import DecodeState


@dataclass(frozen=True)
class WindowView:
    """The part of the canvas that a step looks at."""

    candidates: Tensor
    """``(b, L)`` bool: masked cells that may be committed now."""
    columns: Tensor
    """``(b, K)`` int64 columns whose logits are needed; covers the candidates."""
    block: Tensor
    """``(b,)`` int64 number of the block a row is in."""
    num_blocks: int
    """Blocks in the whole response."""


@runtime_checkable
class Window(Protocol):
    """Decides where a step may commit."""

    def view(self, state: DecodeState) -> WindowView:
        """The window of every row for this step."""
        ...


def first_column(is_in: Tensor) -> Tensor:
    """First ``True`` column of each row.

    Args:
        is_in: ``(b, L)`` bool with at least one ``True`` in each row.

    Returns:
        ``(b,)`` int64.
    """
    return is_in.to(torch.uint8).argmax(1)


class FullWindow(Window):
    """The whole response at once."""

    def view(self, state: DecodeState) -> WindowView:
        """All masked cells; the columns are the response region."""
        b, L = state.ids.shape
        columns = torch.arange(state.start, L, device=state.ids.device).expand(b, -1)
        return WindowView(state.masked, columns, torch.zeros_like(state.rows), 1)


class BlockWindow(Window):
    """Semi-autoregressive blocks: a row works on its leftmost block that still has masks.

    A row moves on as soon as its block is full, whatever the step number (the original Fast-dLLM
    loop, arXiv 2505.22618, does the same); rows of a batch may be in different blocks.
    """

    def __init__(self, block_length: int = 32) -> None:
        """Sets the block length in tokens."""
        if block_length < 1:
            raise ValueError(f"block_length: expected at least 1, got {block_length}")
        self.block_length = block_length

    def view(self, state: DecodeState) -> WindowView:
        """The masked cells of each row's current block."""
        L = state.ids.shape[1]
        columns = torch.arange(L, device=state.ids.device)
        block = (first_column(state.masked) - state.start).div(
            self.block_length, rounding_mode="floor"
        )
        begin = state.start + block * self.block_length
        in_block = (columns >= begin[:, None]) & (columns < (begin + self.block_length)[:, None])
        offsets = torch.arange(min(self.block_length, L - state.start), device=columns.device)
        return WindowView(
            candidates=state.masked & in_block,
            # A last block that is cut short repeats its last column, which is harmless.
            columns=(begin[:, None] + offsets).clamp_max(L - 1),
            block=block,
            num_blocks=-(-(L - state.start) // self.block_length),
        )


class SlidingWindow(Window):
    """A window of fixed width that starts at the leftmost mask (TraceLock's soft crop)."""

    def __init__(self, width: int = 128) -> None:
        """Sets the width in tokens."""
        if width < 1:
            raise ValueError(f"width: expected at least 1, got {width}")
        self.width = width

    def view(self, state: DecodeState) -> WindowView:
        """The masked cells in ``[a, a + width)``, with ``a`` the row's first masked column."""
        L = state.ids.shape[1]
        columns = torch.arange(L, device=state.ids.device)
        begin = first_column(state.masked)
        inside = columns < (begin + self.width)[:, None]
        offsets = torch.arange(min(self.width, L - state.start), device=columns.device)
        return WindowView(
            candidates=state.masked & inside,
            columns=(begin[:, None] + offsets).clamp_max(L - 1),
            block=torch.zeros_like(state.rows),
            num_blocks=1,
        )
