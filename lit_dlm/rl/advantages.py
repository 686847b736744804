"""Advantages of rollouts: comparisons within a group, and estimates over the steps of a decode.

A decode writes several tokens per step, so returns and advantages are first formed per step and
then given back to its tokens (TraceRL, arXiv:2509.06949, section on the diffusion value model).

A new advantage is a class of one's own with a method ``compute``, named by its import path:
``data.advantage: my_file.MyAdvantage`` (``examples/advantage.py``).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lit_dlm.losses.states import step_groups
from lit_dlm.ops.options import within
from lit_dlm.plugs import Plug


class Advantage(Plug):
    """Turns the rewards of one prompt's responses into their advantages."""

    @abstractmethod
    def compute(self, rewards: Tensor) -> Tensor:
        """``(n,)`` float32 advantages of one group's responses, from as many float32 rewards."""


class GroupZScore(Advantage):
    """Rewards less their mean, in population standard deviations (GRPO, arXiv:2402.03300)."""

    def compute(self, rewards: Tensor) -> Tensor:
        centred = rewards - rewards.mean(-1, keepdim=True)
        # Equal rewards can have a tiny deviation after rounding, but never a range.
        is_flat = rewards.amax(-1, keepdim=True) == rewards.amin(-1, keepdim=True)
        deviation = rewards.std(-1, correction=0, keepdim=True)
        return torch.where(is_flat, 0.0, centred / torch.where(is_flat, 1.0, deviation))


class LeaveOneOut(Advantage):
    """Each reward less the mean of the others (RLOO, arXiv:2402.14740; coupled-GRPO 2506.20639)."""

    def compute(self, rewards: Tensor) -> Tensor:
        n = rewards.shape[-1]
        if n == 1:
            return torch.zeros_like(rewards)
        return (rewards - rewards.mean(-1, keepdim=True)) * (n / (n - 1))


class GroupMean(Advantage):
    """Rewards less their mean, over a constant.

    The spread of a group or of a batch as the divisor (GRPO) makes a small price as loud as a wrong
    answer wherever all responses are right; a constant does not (as in Dr. GRPO, arXiv:2503.20783).

    Args:
        scale: the constant.
        clip: largest advantage, in either direction.
    """

    def __init__(self, scale: float = 1.0, clip: float = math.inf) -> None:
        within("(0, inf]", scale=scale, clip=clip)
        self.scale, self.clip = scale, clip

    def compute(self, rewards: Tensor) -> Tensor:
        return ((rewards - rewards.mean()) / self.scale).clamp(-self.clip, self.clip)


class RawReward(Advantage):
    """The rewards themselves, without a baseline (REINFORCE)."""

    def compute(self, rewards: Tensor) -> Tensor:
        return rewards


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
        rewards, B = rewards.to(values.dtype), len(members)
        number = step_groups(steps, members)  # (B, G) from 0 in each row
        num_steps = int(torch.where(members, number, -1).max()) + 1
        number = torch.where(members, number, num_steps)

        def mean(cells: Tensor) -> Tensor:  # (B, num_steps + 1), the last one unused
            total = cells.new_zeros(B, num_steps + 1).scatter_add_(1, number, cells * members)
            count = torch.zeros_like(total).scatter_add_(1, number, members.to(cells.dtype))
            return total / count.clamp_min(1)

        step_reward, step_value = mean(rewards), mean(values)
        num_of_row = torch.where(members, number, -1).amax(1) + 1
        # Entry t: return, value and advantage of the step behind step t; nothing lies behind the
        # last one and behind the cells left out, which come after it.
        behind = values.new_zeros(num_steps + 1, 3, B)
        for t in range(num_steps - 1, 0, -1):  # a recursion in time
            next_return, next_value, next_advantage = behind[t]
            bootstrap = self.gamma * next_value + self.gamma * self.lam * next_advantage
            surplus = step_reward[:, t] - step_value[:, t] + bootstrap
            own = step_reward[:, t] + self.gamma * next_return, step_value[:, t], surplus
            behind[t - 1] = torch.where(t < num_of_row, torch.stack(own), 0.0)
        next_return, next_value, next_advantage = (
            table.gather(1, number) for table in behind.permute(1, 2, 0)
        )
        returns = rewards + self.gamma * next_return
        advantages = (
            rewards - values + self.gamma * next_value + self.gamma * self.lam * next_advantage
        )
        return StepEstimates(
            torch.where(members, returns, 0.0), torch.where(members, advantages, 0.0)
        )
