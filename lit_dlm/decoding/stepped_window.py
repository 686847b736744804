"""Blocks that follow the step number: how some releases count, kept for comparison with them."""

from __future__ import annotations

import torch

from lit_dlm.decoding.state import DecodeState
from lit_dlm.decoding.windows import Window, WindowView


class SteppedBlockWindow(Window):
    """Blocks of equal length and equally many steps, whatever is still masked.

    Step ``t`` belongs to block ``t // (steps / blocks)``, and to the last block from there on; a
    step may commit masks left of its block's end. Where a block is full before its steps are used
    up, the rest of them commit nothing and count all the same: the TraceLock release (arXiv
    2605.24697) decodes its baselines so, with 128 steps for each block of 128. :class:`BlockWindow`
    moves on.
    """

    def __init__(self, block_length: int = 128, *, steps: int = 256) -> None:
        """Sets the blocks.

        Args:
            block_length: in tokens; the response must be a multiple.
            steps: for the whole response; a multiple of its blocks.
        """
        for name, value in (("block_length", block_length), ("steps", steps)):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        self.block_length = block_length
        self.steps = steps

    def view(self, state: DecodeState) -> WindowView:
        """The masked cells left of the end of this step's block.

        Raises:
            ValueError: the response or the steps cannot be shared evenly by the blocks.
        """
        b, L = state.ids.shape
        num_blocks, rest = divmod(L - state.start, self.block_length)
        if rest or self.steps % num_blocks:
            raise ValueError(
                f"SteppedBlockWindow: expected a response of a multiple of {self.block_length} "
                f"tokens and a multiple of its blocks as steps, got {L - state.start} tokens and "
                f"{self.steps} steps"
            )
        number = (state.step // (self.steps // num_blocks)).clamp_max(num_blocks - 1)
        ends = state.start + (number + 1) * self.block_length
        end = int(ends.max())  # of the row that is furthest; a GPU is waited for
        columns = torch.arange(L, device=state.ids.device)
        return WindowView(
            candidates=state.masked & (columns < ends[:, None]),
            columns=columns[state.start : end].expand(b, -1),
            block=number,
            num_blocks=num_blocks,
        )

    def bounds(self, column: int, *, start: int, length: int, first: int) -> tuple[int, int]:
        """Always refused: a cache asks for the block of a mask, and here the step decides."""
        raise ValueError(
            "cache: SteppedBlockWindow follows the step number; expected BlockWindow or FullWindow"
        )
