"""Advantages of rollouts: comparisons within a group, and estimates over the steps of a decode.

A decode writes several tokens per step, so returns and advantages are first formed per step and
then given back to its tokens (TraceRL, arXiv:2509.06949, section on the diffusion value model).

A new advantage is a class of one's own with a method ``compute``, named by its import path:
``data.advantage: my_file.MyAdvantage`` (``examples/advantage.py``).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lit_dlm.plugs import Plug, checked_plug


class Advantage(Plug):
    """Turns the rewards of one prompt's responses into their advantages."""

    @abstractmethod
    def compute(self, rewards: Tensor) -> Tensor:
        """Advantages of one group.

        Args:
            rewards: ``(n,)`` float32, one reward per response to the same prompt.

        Returns:
            ``(n,)`` float32.
        """


class GroupZScore(Advantage):
    """Rewards less their mean, in population standard deviations (GRPO, arXiv:2402.03300)."""

    def compute(self, rewards: Tensor) -> Tensor:
        """Zeros where all rewards of the group are equal."""
        centred = rewards - rewards.mean(-1, keepdim=True)
        # Equal rewards can have a tiny deviation after rounding, but never a range.
        is_flat = rewards.amax(-1, keepdim=True) == rewards.amin(-1, keepdim=True)
        deviation = rewards.std(-1, correction=0, keepdim=True)
        return torch.where(is_flat, 0.0, centred / torch.where(is_flat, 1.0, deviation))


class LeaveOneOut(Advantage):
    """Each reward less the mean of the others (RLOO, arXiv:2402.14740; coupled-GRPO 2506.20639)."""

    def compute(self, rewards: Tensor) -> Tensor:
        """Zeros for a group of one."""
        n = rewards.shape[-1]
        if n == 1:
            return torch.zeros_like(rewards)
        return (rewards - rewards.mean(-1, keepdim=True)) * (n / (n - 1))


class RawReward(Advantage):
    """The rewards themselves, without a baseline (REINFORCE)."""

    def compute(self, rewards: Tensor) -> Tensor:
        """The rewards."""
        return rewards


_BY_NAME: dict[str, type[Advantage]] = {
    "group_zscore": GroupZScore,
    "leave_one_out": LeaveOneOut,
    "none": RawReward,
}


def as_advantage(advantage: Advantage | str) -> Advantage:
    """The advantage that a setting names.

    Args:
        advantage: an object with a method ``compute``, or ``group_zscore``, ``leave_one_out`` or
            ``none``.
    """
    found = advantage
    if isinstance(found, str):
        if found not in _BY_NAME:
            raise ValueError(
                f"advantage: expected {', '.join(map(repr, _BY_NAME))} or the import path of a "
                f"class with a method 'compute', got {advantage!r}"
            )
        found = _BY_NAME[found]()
    return checked_plug(found, Advantage, option="advantage")


def outcome_rewards(totals: Tensor, steps: Tensor, members: Tensor) -> Tensor:
    """Puts the reward of a response on every token that its last step wrote.

    Args:
        totals: ``(B,)`` floating point.
        steps: ``(B, G)`` int64 number of the step that wrote each cell.
        members: ``(B, G)`` bool, cells that are trained.

    Returns:
        ``(B, G)`` of the dtype of ``totals``, 0 elsewhere.
    """
    last = torch.where(members, steps, -1).amax(1, keepdim=True)
    return torch.where(members & (steps == last), totals[:, None], 0.0)


class StepEstimates(NamedTuple):
    """What value and policy are trained towards."""

    returns: Tensor
    """``(B, G)``: target of each token's value."""
    advantages: Tensor
    """``(B, G)``: advantage of each token."""


@dataclass(frozen=True)
class StepGAE:
    """Generalised advantage estimation over the steps of a decode.

    With ``r*``, ``V*`` the means over the trained tokens of step ``t`` and nothing past the end::

        R*_t = r*_t + g R*_{t+1}    A*_t = r*_t - V*_t + g V*_{t+1} + g l A*_{t+1}
        R_k  = r_k + g R*_{t+1}     A_k  = r_k - V_k + g V*_{t+1} + g l A*_{t+1}

    for a token ``k`` that step ``t`` wrote. The mean of ``A_k`` over a step is ``A*_t``.
    """

    gamma: float = 1.0
    """Discount per step, ``g``."""
    lam: float = 1.0
    """Weight of longer estimates, ``l``."""

    def compute(
        self, rewards: Tensor, values: Tensor, steps: Tensor, members: Tensor
    ) -> StepEstimates:
        """Returns and advantages of every token.

        Args:
            rewards: ``(B, G)`` floating point, reward of each token.
            values: ``(B, G)`` floating point, value of each token just before it was written.
            steps: ``(B, G)`` int64 order of writing; only the order of a row's distinct numbers
                counts.
            members: ``(B, G)`` bool, cells that are trained; all others have no part in any mean.

        Returns:
            In the dtype of ``values``, 0 outside the members.
        """
        B = len(members)
        number = torch.where(members, steps, torch.iinfo(torch.long).max)
        ordered, order = number.sort(dim=1, stable=True)
        is_new = torch.ones_like(members)
        is_new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        # (B, G) place of each cell's step among the row's distinct ones; cells left out come last.
        place = torch.empty_like(order).scatter_(1, order, is_new.long().cumsum(1) - 1)
        num_steps = int(torch.where(members, place, -1).max()) + 1 if members.any() else 0
        place = torch.where(members, place, num_steps)

        def mean(cells: Tensor) -> Tensor:  # (B, num_steps + 1), the last one unused
            total = cells.new_zeros(B, num_steps + 1).scatter_add_(1, place, cells * members)
            count = cells.new_zeros(B, num_steps + 1).scatter_add_(
                1, place, members.to(cells.dtype)
            )
            return total / count.clamp_min(1)

        step_reward, step_value = mean(rewards.to(values.dtype)), mean(values)
        has_step = torch.arange(num_steps + 1, device=steps.device) <= torch.where(
            members, place, -1
        ).amax(1, keepdim=True)
        zero = values.new_zeros(B)
        # What follows step t: its return, value and advantage.
        later = [(zero, zero, zero)]
        for t in range(num_steps - 1, -1, -1):  # a recursion in time
            next_return, next_value, next_advantage = later[-1]
            taken = has_step[:, t]
            bootstrap = self.gamma * next_value + self.gamma * self.lam * next_advantage
            later.append(
                (
                    torch.where(taken, step_reward[:, t] + self.gamma * next_return, 0.0),
                    torch.where(taken, step_value[:, t], 0.0),
                    torch.where(taken, step_reward[:, t] - step_value[:, t] + bootstrap, 0.0),
                )
            )
        later.reverse()  # entry t: step t; the last entry: past the end
        following = [
            torch.stack(parts, 1) for parts in zip(*later[1:], (zero, zero, zero), strict=True)
        ]
        next_return, next_value, next_advantage = (part.gather(1, place) for part in following)
        rewards = rewards.to(values.dtype)
        returns = rewards + self.gamma * next_return
        advantages = (
            rewards - values + self.gamma * next_value + self.gamma * self.lam * next_advantage
        )
        return StepEstimates(
            torch.where(members, returns, 0.0), torch.where(members, advantages, 0.0)
        )
