"""Quotas: how many cells of each row a step commits."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from lit_dlm.config.components import Component
from lit_dlm.decoding.state import DecodeState
from lit_dlm.decoding.windows import Window
from lit_dlm.system.options import at_least, refuse
from lit_dlm.tensors.batches import DeviceTable


class Quota(Component):
    """Decides how many cells a step commits."""

    is_given: bool = True
    """Whether it gives numbers at all; otherwise the policy decides alone."""
    graph_safe = False

    def check(self, window: Window) -> None:
        """Raises ``ValueError`` for a window in which it could not keep what it promises."""

    @abstractmethod
    def counts(self, state: DecodeState, candidates: Tensor) -> Tensor | None:
        """``(b,)`` int64 commits per row, or ``None`` when the policy decides alone."""


class NoQuota(Quota):
    """The policy decides how many."""

    is_given = False

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
            wanted = "exactly one of steps and steps_per_block"
            refuse(type(self).__name__, wanted, f"{steps} and {steps_per_block}")
        self.steps = steps
        self.steps_per_block = steps_per_block

    def describe(self) -> dict[str, Any]:
        options = ("steps", "steps_per_block", "eps")
        return {name: value for name in options if (value := getattr(self, name, None)) is not None}


class EvenQuota(_StepsQuota):
    """A fixed number of steps, shared evenly by the blocks and inside each block.

    A block with ``m`` masks and ``S`` steps commits ``m // S`` per step and one more in the first
    ``m % S`` steps (LLaDA, arXiv 2502.09992, reference sampler; the static remasking of dLLM-RL's
    block sampler, whose ``S`` is given per block, and which divides the length of a block that
    begins in the prompt). ``steps`` must be a multiple of the number of blocks.
    """

    def check(self, window: Window) -> None:
        _expect_steps_kept(self, window, not window.slides)

    def counts(self, state: DecodeState, candidates: Tensor) -> Tensor | None:
        steps = self.steps_per_block
        if steps is None:
            assert self.steps is not None
            if self.steps % state.num_blocks:
                refuse("steps", f"a multiple of the {state.num_blocks} blocks", self.steps)
            steps = self.steps // state.num_blocks
        # Counts of masks at entry, not of those left: a cap or a gate that held some back does not
        # change the shares of later steps.
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
        shares = 1.0 - times[1:] / times[:-1]
        shares[-1] = 1.0  # the last step takes the rest
        self._shares = DeviceTable(shares)

    def check(self, window: Window) -> None:
        # The first blocks would take all steps of the response.
        if self.steps is not None and window.blocks is not None:
            both = f"{type(self).__name__} with {type(window).__name__}"
            raise ValueError(f"quota: {both} needs steps_per_block, got steps")

    def counts(self, state: DecodeState, candidates: Tensor) -> Tensor | None:
        # Shares of what is left now, as in the release, so early truncation is made up for later.
        masks = candidates.sum(1)
        step = state.block_step if self.steps is None else state.step
        return (masks * self._shares[step.clamp_max(len(self._shares) - 1)]).long()


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

    def check(self, window: Window) -> None:
        _expect_steps_kept(self, window, not window.slides)

    def counts(self, state: DecodeState, candidates: Tensor) -> Tensor | None:
        if self.steps < state.num_blocks:
            refuse("steps", f"at least one for each of the {state.num_blocks} blocks", self.steps)
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
        kept = torch.stack([torch.cos(ratio * math.pi * 0.5) for ratio in ratios])
        self._kept = DeviceTable(kept)

    def check(self, window: Window) -> None:
        _expect_steps_kept(self, window, window.is_whole)

    def counts(self, state: DecodeState, candidates: Tensor) -> Tensor | None:
        masks = candidates.sum(1)
        step = state.block_step.clamp_max(self.steps - 1)
        kept = (state.block_masks * self._kept[step]).floor().long()
        kept = kept.minimum(masks - 1).clamp_min(1)
        return torch.where(step == self.steps - 1, masks, masks - kept)


def _expect_steps_kept(quota: Quota, window: Window, is_kept: bool) -> None:
    if not is_kept:
        wanted = f"one that keeps the steps of {type(quota).__name__}, such as FullWindow"
        refuse("window", wanted, type(window).__name__)
