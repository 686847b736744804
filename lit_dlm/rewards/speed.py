"""Rewards of few forwards, for policies that decide what a step commits."""

from __future__ import annotations

from collections.abc import Sequence

from lit_dlm.ops.options import at_least
from lit_dlm.rewards.base import Reward, RewardScore, Rollout


class ForwardPrice(Reward):
    """Takes a price for every forward of a decode, whatever its answer is worth.

    Args:
        price: of a forward, in the reward of a right answer.
    """

    name = "forwards"

    def __init__(self, price: float) -> None:
        at_least(0, price=price)
        self.price = price

    def score(self, group: Sequence[Rollout]) -> list[RewardScore]:
        return [RewardScore(total=-self.price * one.trajectory.num_steps) for one in group]


class RightAndFast(Reward):
    """Pays a right answer by the share of forwards that it saves, and a wrong one nothing.

    The product of correctness and speed of arXiv 2512.09106: no speed makes up for a wrong answer,
    and slow right answers are worth little.
    """

    name = "right_and_fast"
    needs_verdict = True

    def score(self, group: Sequence[Rollout]) -> list[RewardScore]:
        return [
            RewardScore(total=one.is_correct * (1.0 - _share(one)), parts={"share": _share(one)})
            for one in group
        ]


def _share(rollout: Rollout) -> float:
    """Forwards of a decode for each of its cells."""
    return rollout.trajectory.num_steps / max(rollout.trajectory.num_generated, 1)
