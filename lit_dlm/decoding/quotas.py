"""Quotas: how many cells a step commits in each row."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from lit_dlm.decoding.state import DecodeState
from lit_dlm.ops.options import at_least
from lit_dlm.plugs import Plug


class Quota(Plug):
    """Decides how many cells a step commits."""

    counts_blocks: bool = True
    """Whether it reads the steps and masks of a row's block (``block_step``, ``block_masks``)."""

    @abstractmethod
    def counts(self, state: DecodeState, candidates: Tensor) -> Tensor | None:
        """``(b,)`` int64 commits per row, or ``None`` when the policy decides alone."""


class NoQuota(Quota):
    """The policy decides how many."""

    counts_blocks = False

    def counts(self, state: DecodeState, candidates: Tensor) -> Tensor | None:
        return None


class FixedQuota(Quota):
    """The same number of commits in every step."""

    counts_blocks = False

    def __init__(self, tokens_per_step: int = 1) -> None:
        at_least(1, tokens_per_step=tokens_per_step)
        self.tokens_per_step = tokens_per_step

    def counts(self, state: DecodeState, candidates: Tensor) -> Tensor | None:
        return candidates.sum(1).clamp_max(self.tokens_per_step)


class EvenQuota(Quota):
    """A fixed number of steps, shared evenly by the blocks and inside each block.

    A block with ``m`` masks and ``S`` steps commits ``m // S`` per step and one more in the first
    ``m % S`` steps (LLaDA, arXiv 2502.09992, reference sampler; the static remasking of dLLM-RL's
    block sampler, whose ``S`` is given per block).
    """

    def __init__(self, steps: int | None = None, *, steps_per_block: int | None = None) -> None:
        """Sets exactly one: the steps of the response, a multiple of its blocks, or of each."""
        _one_of(type(self).__name__, steps=steps, steps_per_block=steps_per_block)
        self.steps = steps
        self.steps_per_block = steps_per_block

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

    def describe(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


class ScheduleQuota(Quota):
    """Dream's linear timestep schedule, truncated to integers.

    With times ``t_0 = 1 > ... > t_steps = eps``, step ``s`` commits
    ``int(masks * (1 - t_{s+1} / t_s))`` and the last step commits the rest; early steps can commit
    nothing (the Dream 7B release, ``diffusion_generate``). With blocks each block runs through the
    times on its own (Fast-dLLM's and dLLM-RL's Dream samplers).
    """

    def __init__(
        self, steps: int | None = None, eps: float = 1e-3, *, steps_per_block: int | None = None
    ) -> None:
        """Sets the last time ``eps`` and the steps: of the response, or of every block."""
        chosen = _one_of(type(self).__name__, steps=steps, steps_per_block=steps_per_block)
        self.steps = steps
        self.steps_per_block = steps_per_block
        self.eps = eps
        # float32, as in the release: truncation makes the counts depend on it.
        times = torch.linspace(1.0, eps, chosen + 1, dtype=torch.float32)
        self._shares = (1.0 - times[1:] / times[:-1]).tolist()

    def counts(self, state: DecodeState, candidates: Tensor) -> Tensor | None:
        masks = candidates.sum(1)
        # The last share takes the rest.
        step = state.block_step if self.steps is None else state.step
        shares = torch.tensor([*self._shares[:-1], 1.0], dtype=torch.float32)
        shares = shares.to(masks.device, non_blocking=True)
        return (masks * shares[step.clamp_max(len(shares) - 1)]).long()

    def describe(self) -> dict[str, Any]:
        if self.steps is None:
            return {"steps_per_block": self.steps_per_block, "eps": self.eps}
        return {"steps": self.steps, "eps": self.eps}


class BudgetQuota(Quota):
    """A number of steps that the decode never exceeds: what is left is shared by the steps left.

    A step commits at least ``ceil(masks / steps left)``. Policies that commit exactly their quota
    thus take even shares; those that may commit more, such as thresholds, need fewer later. With
    blocks every one of them gets at least a step.
    """

    counts_blocks = False

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

    def describe(self) -> dict[str, Any]:
        return {"steps": self.steps}


def _one_of(owner: str, **options: int | None) -> int:
    """The value of the only option that is given."""
    given = {name: value for name, value in options.items() if value is not None}
    if len(given) != 1:
        raise ValueError(f"{owner}: expected exactly one of {' and '.join(options)}, got {given}")
    at_least(1, **given)  # type: ignore[arg-type]
    return next(iter(given.values()))
