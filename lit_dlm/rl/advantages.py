"""Advantages of rollouts: comparisons within a group, and estimates over the steps of a decode.

A decode writes several tokens per step, so returns and advantages are first computed per step and
then passed on to its tokens (TraceRL, arXiv:2509.06949, section on the diffusion value model).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_dlm.config.components import Component
from lit_dlm.system.options import within
from lit_dlm.training.states import step_groups


class Advantage(Component):
    """Turns the rewards of one prompt's responses into their advantages."""

    @abstractmethod
    def compute(self, rewards: Tensor) -> Tensor:
        """Returns ``(n,)`` float32 advantages of a group's responses for ``n`` float32 rewards."""


class GroupZScore(Advantage):
    """Rewards less their mean, divided by their population deviation (GRPO, arXiv:2402.03300)."""

    def compute(self, rewards: Tensor) -> Tensor:
        centred = rewards - rewards.mean(-1, keepdim=True)
        # Equal rewards can have a tiny deviation after rounding, but never a range: divided by it,
        # noise of 1e-8 would become advantages of 1.
        is_flat = rewards.amax(-1, keepdim=True) == rewards.amin(-1, keepdim=True)
        deviation = rewards.std(-1, correction=0, keepdim=True)
        return torch.where(is_flat, 0.0, centred / torch.where(is_flat, 1.0, deviation))


class LeaveOneOut(Advantage):
    """Each reward less the mean of the others (RLOO, arXiv:2402.14740; coupled-GRPO 2506.20639)."""

    def compute(self, rewards: Tensor) -> Tensor:
        n = rewards.shape[-1]
        if n == 1:
            return torch.zeros_like(rewards)
        # r - (sum - r) / (n - 1) = (r - sum / n) n / (n - 1), without a sum of the others for each.
        return (rewards - rewards.mean(-1, keepdim=True)) * (n / (n - 1))


class GroupMean(Advantage):
    """Rewards less their mean, divided by a constant (as in Dr. GRPO, arXiv:2503.20783).

    Args:
        scale: the constant.
        clip: largest absolute advantage.
    """

    def __init__(self, scale: float = 1.0, clip: float = math.inf) -> None:
        within("(0, inf]", scale=scale, clip=clip)
        self.scale, self.clip = scale, clip

    def compute(self, rewards: Tensor) -> Tensor:
        # Dividing by the spread of a group (GRPO) makes a small price count as much as a wrong
        # answer wherever all responses are right; a constant does not.
        return ((rewards - rewards.mean()) / self.scale).clamp(-self.clip, self.clip)


class LessFirst(GroupMean):
    """Rewards less that of the first response, divided by a constant.

    For groups whose first response is what the others differ from in one decision.
    """

    def compute(self, rewards: Tensor) -> Tensor:
        return ((rewards - rewards[0]) / self.scale).clamp(-self.clip, self.clip)


class RawReward(Advantage):
    """The rewards themselves, without a baseline (REINFORCE)."""

    def compute(self, rewards: Tensor) -> Tensor:
        return rewards


def outcome_rewards(totals: Tensor, steps: Tensor, members: Tensor) -> Tensor:
    """Puts the ``(B,)`` rewards of responses on every token that the last step wrote.

    ``steps`` are ``(B, G)`` int64, ``members`` bool: what is trained. Returns ``(B, G)``.
    """
    # The recursion takes means over steps, so each of these tokens has the whole reward.
    last = torch.where(members, steps, -1).amax(1, keepdim=True)
    return torch.where(members & (steps == last), totals[:, None], 0.0)


@dataclass(frozen=True)
class StepGAE:
    """Generalised advantage estimation over the steps of a decode.

    ``r*`` and ``V*`` are means over the trained tokens of step ``t``; all is 0 past the last step::

        R*_t = r*_t + g R*_{t+1}    A*_t = r*_t - V*_t + g V*_{t+1} + g l A*_{t+1}
        R_k  = r_k + g R*_{t+1}     A_k  = r_k - V_k + g V*_{t+1} + g l A*_{t+1}

    for a token ``k`` that step ``t`` wrote. The mean of ``A_k`` over a step is ``A*_t``.
    """

    gamma: float = 1.0  # discount per step, ``g``
    lam: float = 1.0  # weight of estimates over more steps, ``l``

    def compute(
        self, rewards: Tensor, values: Tensor, steps: Tensor, members: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Computes the return (the target of its value) and the advantage of every token.

        All are ``(B, G)``; the results have the dtype of ``values``, and are 0 outside the members.

        Args:
            rewards: of each token.
            values: of each token just before it was written.
            steps: int64 numbers of steps; only their order within a row matters.
            members: bool, positions that are trained; the others enter no mean.
        """
        # Per step first, then per token: a step's tokens are written at once, so none of them is
        # before another, and a decode of few steps is discounted less than one of many.
        rewards, B = rewards.to(values.dtype), len(members)
        number = step_groups(steps, members)  # (B, G) from 0 in each row
        num_steps = int(torch.where(members, number, -1).max()) + 1
        number = torch.where(members, number, num_steps)  # a column that no mean is read from

        def mean(tokens: Tensor) -> Tensor:  # (B, num_steps + 1)
            total = tokens.new_zeros(B, num_steps + 1).scatter_add_(1, number, tokens * members)
            count = torch.zeros_like(total).scatter_add_(1, number, members.to(tokens.dtype))
            return total / count.clamp_min(1)

        step_reward, step_value = mean(rewards), mean(values)
        num_of_row = torch.where(members, number, -1).amax(1) + 1
        # Entry t: return, value and advantage of the step after step t; 0 for the last step, and
        # for the positions left out, whose number comes after it.
        behind = values.new_zeros(num_steps + 1, 3, B)
        for t in range(num_steps - 1, 0, -1):  # a recursion in time
            next_return, next_value, next_advantage = behind[t]
            bootstrap = self.gamma * next_value + self.gamma * self.lam * next_advantage
            surplus = step_reward[:, t] - step_value[:, t] + bootstrap
            own = step_reward[:, t] + self.gamma * next_return, step_value[:, t], surplus
            # Rows with fewer steps begin their recursion later, with nothing behind them.
            behind[t - 1] = torch.where(t < num_of_row, torch.stack(own), 0.0)
        next_return, next_value, next_advantage = (
            table.gather(1, number) for table in behind.permute(1, 2, 0)
        )
        returns = rewards + self.gamma * next_return
        advantages = (
            rewards - values + self.gamma * next_value + self.gamma * self.lam * next_advantage
        )
        return torch.where(members, returns, 0.0), torch.where(members, advantages, 0.0)
