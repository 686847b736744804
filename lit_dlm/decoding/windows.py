"""Windows: where a step may commit."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_dlm.backbones.base import BackboneSpec, BlockOrigin
from lit_dlm.backbones.visibility import first_column
from lit_dlm.config.components import Component
from lit_dlm.decoding.state import DecodeState
from lit_dlm.system.options import at_least
from lit_dlm.tensors.batches import reads_are_free


@dataclass(frozen=True)
class WindowView:
    """The part of the canvas that a step looks at."""

    candidates: Tensor  # (b, L) bool: masked cells that may be committed now
    # (b, K) int64 columns whose logits are needed, from the window's first one on; they cover the
    # candidates, and a row with fewer repeats one
    columns: Tensor
    block: Tensor  # (b,) int64 number of the block a row is in
    num_blocks: int  # blocks in the whole response


class Window(Component):
    """Decides where a step may commit."""

    steps: int = 0
    """Steps that every row may take, even if it has fewer masks."""
    is_whole: bool = False
    """Whether every step may write anywhere in the response."""
    slides: bool = False
    """Whether it moves on before it is full: then no step knows a share of the masks to come."""
    pipelined: bool = False
    """Whether it is in several blocks at once, which only block attention allows; then it has
    :meth:`reach` and :meth:`stalled`."""
    graph_safe = False

    @property
    def blocks(self) -> tuple[int, BlockOrigin] | None:
        """Length and origin of its blocks, if it goes through blocks, each until it is full."""
        return None

    @abstractmethod
    def view(self, state: DecodeState) -> WindowView:
        """Returns the window of every row for this step."""

    def bounds(self, column: int, *, start: int, length: int, first: int) -> tuple[int, int]:
        """Returns first column and end of the block around a row's leftmost mask, for caches.

        Args:
            column: that of the mask; ``start`` is that of the response.
            length: columns of the canvas.
            first: column of the row's first real token.
        """
        raise ValueError(
            f"cache: {type(self).__name__} has no blocks at whose start a cache could be "
            "refreshed; expected BlockWindow, FullWindow or one that has a method bounds"
        )

    def reach(self, state: DecodeState) -> Tensor:
        """``(b,)`` int64: end of the last block of a window that is in several."""
        raise NotImplementedError

    def stalled(
        self, state: DecodeState, candidates: Tensor, commit: Tensor, scores: Tensor
    ) -> Tensor:
        """``(b, L)`` bool: what the stall rule commits in a window that is in several blocks.

        Args:
            commit: ``(b, L)`` bool, what is committed without it.
            scores: ``(b, L)``, the policy's.
        """
        raise NotImplementedError


def masks_first(state: DecodeState, columns: Tensor) -> Tensor:
    """``(b, k)`` indices into ``(b, K)`` columns, masked ones first; ``k`` is the most in any row.

    Only masked columns matter, half of a block on average. For the CPU: it reads their number.
    """
    masked = state.masked.gather(1, columns)
    # One column at least: a forward of none would be a case of its own everywhere.
    most = max(int(masked.sum(1).max()), 1)
    return masked.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]


class FullWindow(Window):
    """The whole response at once."""

    is_whole = True

    def view(self, state: DecodeState) -> WindowView:
        b, L = state.ids.shape
        columns = torch.arange(state.start, L, device=state.ids.device).expand(b, -1)
        return WindowView(state.masked, columns, torch.zeros_like(state.rows), 1)

    def bounds(self, column: int, *, start: int, length: int, first: int) -> tuple[int, int]:
        return start, length


class BlockWindow(Window):
    """Semi-autoregressive blocks: a row works on its leftmost block that still has masks.

    A row moves on as soon as its block is full, whatever the step number (the original Fast-dLLM
    loop, arXiv 2505.22618, does the same); rows of a batch may be in different blocks.

    Args:
        block_length: in tokens.
        origin: where blocks are counted from; with ``sequence``, block models decode in the
            blocks of their own generators, and a row's first block may begin in its prompt.
    """

    def __init__(self, block_length: int = 32, *, origin: BlockOrigin = "response") -> None:
        at_least(1, block_length=block_length)
        self.block_length = block_length
        self.origin: BlockOrigin = origin

    @property
    def blocks(self) -> tuple[int, BlockOrigin]:
        return self.block_length, self.origin

    def view(self, state: DecodeState) -> WindowView:
        L = state.ids.shape[1]
        columns = torch.arange(L, device=state.ids.device)
        origin: int | Tensor = state.start
        if self.origin == "sequence":
            origin = L - 1 - state.positions[:, -1]  # the column of the first real token
        begin = self._begin(first_column(state.unfinished), origin)[:, None]
        longest = L - state.start if self.origin == "response" else L
        return WindowView(
            # Left of a row's leftmost block there are no masks.
            candidates=state.masked & (columns < begin + self.block_length),
            # A last block that is cut short repeats its last column, which is harmless. Without
            # masks, a row may begin left of the canvas.
            columns=(begin + columns[: min(self.block_length, longest)]).clamp(0, L - 1),
            # Rounded up: a first block that begins in the prompt is block 0.
            block=(begin[:, 0] + (self.block_length - 1 - state.start)) // self.block_length,
            num_blocks=-(-(L - state.start) // self.block_length),
        )

    def bounds(self, column: int, *, start: int, length: int, first: int) -> tuple[int, int]:
        begin = self._begin(column, start if self.origin == "response" else first)
        return begin, min(begin + self.block_length, length)

    def _begin(self, column: Any, origin: Any) -> Any:
        """First column of the block around a column, for integers and for tensors."""
        # The remainder is never negative, in Python and in torch: a column before the origin is in
        # a block that ends there.
        return column - (column - origin) % self.block_length

    def describe(self) -> dict[str, Any]:
        origin = {} if self.origin == "response" else {"origin": self.origin}
        return {"block_length": self.block_length, **origin}


def default_window(spec: BackboneSpec) -> Window:
    """Returns the blocks of a block model (SDAR, 2510.06303), otherwise the whole response."""
    if spec.attention == "full":
        return FullWindow()
    assert spec.block_size is not None
    return BlockWindow(spec.block_size, origin=spec.block_origin)


def check_window(window: Window, spec: BackboneSpec) -> None:
    """Refuses a window in which a block model could write a block before an earlier one."""
    # No block sees a later one: a block written ahead would be decided without the text before it.
    if spec.attention == "full":
        if window.pipelined:
            raise ValueError(
                f"window: {type(window).__name__} needs block attention, under which what is begun "
                f"later changes nothing before it; got {spec.family} with full attention"
            )
        return
    size, origin = spec.block_size, spec.block_origin
    assert size is not None
    if window.blocks is None or window.blocks[1] != origin or size % window.blocks[0] != 0:
        raise ValueError(
            f"window: {spec.family} writes block after block, so expected BlockWindow with origin "
            f"{origin!r} and block_length {size} or a divisor, got {type(window).__name__}"
        )


class SlidingWindow(Window):
    """A window of fixed width that starts at the leftmost mask (TraceLock's soft crop)."""

    slides = True

    def __init__(self, width: int = 128) -> None:
        at_least(1, width=width)
        self.width = width

    def view(self, state: DecodeState) -> WindowView:
        L = state.ids.shape[1]
        columns = torch.arange(L, device=state.ids.device)
        begin = first_column(state.unfinished)[:, None]
        return WindowView(
            candidates=state.masked & (columns < begin + self.width),
            columns=(begin + columns[: min(self.width, L - state.start)]).clamp_max(L - 1),
            block=torch.zeros_like(state.rows),
            num_blocks=1,
        )


class SteppedBlockWindow(Window):
    """Blocks of equal length with an equal share of the ``steps`` each, whatever is still masked.

    Step ``t`` belongs to block ``t // (steps / blocks)``; a step may commit masks left of its
    block's end. If a block is full before its steps are used up, the rest of them commit nothing
    but still count. The TraceLock release (arXiv 2605.24697) decodes its baselines in this way,
    with 128 steps for each block of 128. :class:`BlockWindow` moves on instead.
    """

    def __init__(self, block_length: int = 128, *, steps: int = 256) -> None:
        at_least(1, block_length=block_length, steps=steps)
        self.block_length = block_length
        self.steps = steps

    def view(self, state: DecodeState) -> WindowView:
        L = state.ids.shape[1]
        num_blocks, rest = divmod(L - state.start, self.block_length)
        if rest or self.steps % num_blocks:
            raise ValueError(
                f"SteppedBlockWindow: expected a response of a multiple of {self.block_length} "
                f"tokens and a multiple of its blocks as steps, got {L - state.start} tokens and "
                f"{self.steps} steps"
            )
        number = (state.step // (self.steps // num_blocks)).clamp_max(num_blocks - 1)
        ends = state.start + (number + 1) * self.block_length
        # Of the row furthest ahead, or of the whole response where asking means waiting.
        end = int(ends.max()) if reads_are_free(ends.device) else L
        columns = torch.arange(L, device=state.ids.device)
        return WindowView(
            candidates=state.masked & (columns < ends[:, None]),
            # A row that is behind repeats its last column.
            columns=columns[state.start : end].minimum(ends[:, None] - 1),
            block=number,
            num_blocks=num_blocks,
        )
