"""Quotas: how many cells a step commits in each row."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from lit_dlm.decoding.state import DecodeState


@runtime_checkable
class Quota(Protocol):
    """Decides how many cells a step commits."""

    def counts(self, state: DecodeState, candidates: Tensor) -> Tensor | None:
        """``(b,)`` int64 commits per row, or ``None`` when the policy decides alone."""
        ...


class NoQuota(Quota):
    """The policy decides how many."""

    def counts(self, state: DecodeState, candidates: Tensor) -> Tensor | None:
        """Always ``None``."""
        return None


class FixedQuota(Quota):
    """The same number of commits in every step."""

    def __init__(self, tokens_per_step: int = 1) -> None:
        """Sets the number of cells per step."""
        if tokens_per_step < 1:
            raise ValueError(f"tokens_per_step: expected at least 1, got {tokens_per_step}")
        self.tokens_per_step = tokens_per_step

    def counts(self, state: DecodeState, candidates: Tensor) -> Tensor | None:
        """``tokens_per_step``, or what is left."""
        return candidates.sum(1).clamp_max(self.tokens_per_step)


class EvenQuota(Quota):
    """A fixed number of steps, shared evenly by the blocks and inside each block.

    A block with ``m`` masks and ``S`` steps commits ``m // S`` per step and one more in the first
    ``m % S`` steps (LLaDA, arXiv 2502.09992, reference sampler).
    """

    def __init__(self, steps: int) -> None:
        """Sets the number of steps for the whole response."""
        if steps < 1:
            raise ValueError(f"steps: expected at least 1, got {steps}")
        self.steps = steps

    def counts(self, state: DecodeState, candidates: Tensor) -> Tensor | None:
        """Even share of the masks that the block held when the row entered it."""
        if self.steps % state.num_blocks:
            raise ValueError(
                f"steps: expected a multiple of the {state.num_blocks} blocks, got {self.steps}"
            )
        steps = self.steps // state.num_blocks
        extra = state.block_step < state.block_masks % steps
        return state.block_masks // steps + extra.long()


class ScheduleQuota(Quota):
    """Dream's linear timestep schedule, truncated to integers.

    With times ``t_0 = 1 > ... > t_steps = eps``, step ``s`` commits
    ``int(masks * (1 - t_{s+1} / t_s))`` and the last step commits the rest; early steps can commit
    nothing (the Dream 7B release, ``diffusion_generate``).
    """

    def __init__(self, steps: int, eps: float = 1e-3) -> None:
        """Sets the number of steps and the last time."""
        if steps < 1:
            raise ValueError(f"steps: expected at least 1, got {steps}")
        if not 0.0 < eps < 1.0:
            raise ValueError(f"eps: expected a number between 0 and 1, got {eps}")
        self.steps = steps
        self.eps = eps
        # float32, as in the release: truncation makes the counts depend on it.
        times = torch.linspace(1.0, eps, steps + 1)
        self._shares = (1.0 - times[1:] / times[:-1]).tolist()

    def counts(self, state: DecodeState, candidates: Tensor) -> Tensor | None:
        """The scheduled share of the candidates; all of them at the last step."""
        masks = candidates.sum(1)
        if state.step >= self.steps - 1:
            return masks
        return (masks * self._shares[state.step]).long()
