"""Windows and quotas: where a step may commit, and how many cells of each row."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_dlm.backbones.base import BackboneSpec, BlockOrigin
from lit_dlm.config.components import Component
from lit_dlm.decoding.state import DecodeState
from lit_dlm.ops.batches import first_column
from lit_dlm.ops.options import at_least


@dataclass(frozen=True)
class WindowView:
    """The part of the canvas that a step looks at."""

    candidates: Tensor  # (b, L) bool: masked cells that may be committed now
    columns: Tensor  # (b, K) int64 columns whose logits are needed; covers the candidates
    block: Tensor  # (b,) int64 number of the block a row is in
    num_blocks: int  # blocks in the whole response


class Window(Component):
    """Decides where a step may commit."""

    steps: int = 0
    """Steps that every row may take, even if it has fewer masks."""

    @abstractmethod
    def view(self, state: DecodeState) -> WindowView:
        """Returns the window of every row for this step."""

    def bounds(self, column: int, *, start: int, length: int, first: int) -> tuple[int, int]:
        """Returns first column and end of the block around a row's leftmost mask, for caches.

        Args:
            first: column of the row's first real token.
        """
        raise ValueError(
            f"cache: {type(self).__name__} has no blocks at whose start a cache could be "
            "refreshed; expected BlockWindow or FullWindow"
        )


def masks_first(state: DecodeState, columns: Tensor) -> Tensor:
    """``(b, k)`` indices into ``(b, K)`` columns, masked ones first; ``k`` is the most in any row.

    Only masked columns matter, half of a block on average. Their number is read from the device, so
    this is for the CPU.
    """
    masked = state.masked.gather(1, columns)
    most = max(int(masked.sum(1).max()), 1)
    return masked.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]


class FullWindow(Window):
    """The whole response at once."""

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
            # A last block that is cut short repeats its last column, which is harmless.
            columns=(begin + columns[: min(self.block_length, longest)]).clamp_max(L - 1),
            # Rounded up: a first block that begins in the prompt is block 0.
            block=(begin[:, 0] + (self.block_length - 1 - state.start)) // self.block_length,
            num_blocks=-(-(L - state.start) // self.block_length),
        )

    def bounds(self, column: int, *, start: int, length: int, first: int) -> tuple[int, int]:
        begin = self._begin(column, start if self.origin == "response" else first)
        return begin, min(begin + self.block_length, length)

    def _begin(self, column: Any, origin: Any) -> Any:
        """First column of the block around a column, for integers and for tensors."""
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
        return
    size, origin = spec.block_size, spec.block_origin
    assert size is not None
    if (
        not isinstance(window, BlockWindow)
        or window.origin != origin
        or size % window.block_length != 0
    ):
        raise ValueError(
            f"window: {spec.family} writes block after block, so expected BlockWindow with origin "
            f"{origin!r} and block_length {size} or a divisor, got {type(window).__name__}"
        )


class SlidingWindow(Window):
    """A window of fixed width that starts at the leftmost mask (TraceLock's soft crop)."""

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
        end = int(ends.max())  # of the row furthest ahead; waits for a GPU
        columns = torch.arange(L, device=state.ids.device)
        return WindowView(
            candidates=state.masked & (columns < ends[:, None]),
            # A row that is behind repeats its last column.
            columns=columns[state.start : end].minimum(ends[:, None] - 1),
            block=number,
            num_blocks=num_blocks,
        )


class Quota(Component):
    """Decides how many cells a step commits."""

    @abstractmethod
    def counts(self, state: DecodeState, candidates: Tensor) -> Tensor | None:
        """``(b,)`` int64 commits per row, or ``None`` when the policy decides alone."""


class NoQuota(Quota):
    """The policy decides how many."""

    def counts(self, state: DecodeState, candidates: Tensor) -> Tensor | None:
        return None


class FixedQuota(Quota):
    """The same number of commits in every step."""

    def __init__(self, tokens_per_step: int = 1) -> None:
        at_least(1, tokens_per_step=tokens_per_step)
        self.tokens_per_step = tokens_per_step

    def counts(self, state: DecodeState, candidates: Tensor) -> Tensor | None:
        return candidates.sum(1).clamp_max(self.tokens_per_step)


class _StepsQuota(Quota):
    """Base of the quotas that take the steps of the response or of every block."""

    def __init__(self, steps: int | None = None, *, steps_per_block: int | None = None) -> None:
        """Sets exactly one: the steps of the response, or those of each block."""
        at_least(1, steps=steps, steps_per_block=steps_per_block)
        if (steps is None) == (steps_per_block is None):
            raise ValueError(
                f"{type(self).__name__}: expected exactly one of steps and steps_per_block, got "
                f"{steps} and {steps_per_block}"
            )
        self.steps = steps
        self.steps_per_block = steps_per_block

    def describe(self) -> dict[str, Any]:
        options = ("steps", "steps_per_block", "eps")
        return {name: value for name in options if (value := vars(self).get(name)) is not None}


class EvenQuota(_StepsQuota):
    """A fixed number of steps, shared evenly by the blocks and inside each block.

    A block with ``m`` masks and ``S`` steps commits ``m // S`` per step and one more in the first
    ``m % S`` steps (LLaDA, arXiv 2502.09992, reference sampler; the static remasking of dLLM-RL's
    block sampler, whose ``S`` is given per block, and which divides the length of a block that
    begins in the prompt). ``steps`` must be a multiple of the number of
    blocks.
    """

    def counts(self, state: DecodeState, candidates: Tensor) -> Tensor | None:
        steps = self.steps_per_block
        if steps is None:
            assert self.steps is not None
            if self.steps % state.num_blocks:
                raise ValueError(
                    f"steps: expected a multiple of the {state.num_blocks} blocks, got {self.steps}"
                )
            steps = self.steps // state.num_blocks
        extra = state.block_step < state.block_masks % steps
        return state.block_masks // steps + extra.long()


class ScheduleQuota(_StepsQuota):
    """Dream's linear timestep schedule, truncated to integers.

    With times ``t_0 = 1 > ... > t_steps = eps``, step ``s`` commits
    ``int(masks * (1 - t_{s+1} / t_s))`` and the last step commits the rest (the Dream 7B release,
    ``diffusion_generate``). With ``steps_per_block`` each block runs through the times on its own
    (Fast-dLLM's and dLLM-RL's Dream samplers). Early steps can commit nothing, which needs
    ``stall_rule: idle``: with ``top1`` they commit a token, and later counts are smaller.
    """

    def __init__(
        self, steps: int | None = None, eps: float = 1e-3, *, steps_per_block: int | None = None
    ) -> None:
        """Sets the last time ``eps`` and the steps: of the response, or of every block."""
        super().__init__(steps, steps_per_block=steps_per_block)
        self.eps = eps
        # float32, as in the release: truncation makes the counts depend on it.
        times = torch.linspace(1.0, eps, (steps or steps_per_block or 0) + 1, dtype=torch.float32)
        self._shares = 1.0 - times[1:] / times[:-1]
        self._shares[-1] = 1.0  # the last step takes the rest

    def counts(self, state: DecodeState, candidates: Tensor) -> Tensor | None:
        masks = candidates.sum(1)
        step = state.block_step if self.steps is None else state.step
        shares = self._shares.to(masks.device, non_blocking=True)
        return (masks * shares[step.clamp_max(len(shares) - 1)]).long()


class BudgetQuota(Quota):
    """A number of steps for the decode: the masks left are shared by the steps left.

    A step commits at least ``ceil(masks / steps left)``. Policies that commit exactly their quota
    thus take even shares; those that may commit more, such as thresholds, need fewer later. Every
    block gets at least one step. The number is exceeded by one step if a row's first block begins
    in its prompt, by up to one per block if a prefix or dual cache of a model with a right shift
    lets the block's first step commit only one cell, by what a cap holds back, and by the steps of
    a policy that takes tokens back.
    """

    def __init__(self, steps: int) -> None:
        at_least(1, steps=steps)
        self.steps = steps

    def counts(self, state: DecodeState, candidates: Tensor) -> Tensor | None:
        if self.steps < state.num_blocks:
            raise ValueError(
                f"steps: expected at least one for each of the {state.num_blocks} blocks, "
                f"got {self.steps}"
            )
        left = (self.steps - state.step).clamp_min(1)
        masks = state.masked.sum(1)
        share = (masks + left - 1) // left
        # When only a step per block is left, the block must be done in this one.
        must_end = left <= state.num_blocks - state.block
        return torch.where(must_end, masks, share)


class CosineQuota(Quota):
    """MaskGIT's cosine schedule (arXiv 2202.04200), as the release of MMaDA rounds it.

    After step ``s`` of ``S`` a response of ``N`` cells keeps ``floor(N cos(pi/2 (s + 1) / S))``
    masks, fewer than before and at least one, and none after the last step.
    """

    def __init__(self, steps: int) -> None:
        at_least(1, steps=steps)
        self.steps = steps
        # float32, as in the release: rounding down makes the counts depend on it.
        ratios = [torch.tensor((step + 1) / steps, dtype=torch.float32) for step in range(steps)]
        self._kept = torch.stack([torch.cos(ratio * math.pi * 0.5) for ratio in ratios])

    def counts(self, state: DecodeState, candidates: Tensor) -> Tensor | None:
        masks = candidates.sum(1)
        step = state.block_step.clamp_max(self.steps - 1)
        kept = self._kept.to(masks.device, non_blocking=True)[step]
        kept = (state.block_masks * kept).floor().long().minimum(masks - 1).clamp_min(1)
        return torch.where(step == self.steps - 1, masks, masks - kept)
