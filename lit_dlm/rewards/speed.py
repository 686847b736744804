"""Rewards for few forwards, for policies that decide what a step commits."""

from __future__ import annotations

from collections.abc import Sequence

from lit_dlm.rewards.base import Reward, RewardScore, Rollout
from lit_dlm.system.options import at_least


class ForwardPrice(Reward):
    """Charges a price for every forward of a decode, whether its answer is right or wrong.

    Args:
        price: of one forward, in units of the reward for a right answer.
    """

    name = "forwards"

    def __init__(self, price: float) -> None:
        at_least(0, price=price)
        self.price = price

    def score(self, group: Sequence[Rollout]) -> list[RewardScore]:
        return [RewardScore(total=-self.price * one.trajectory.num_steps) for one in group]


class RightAndFast(Reward):
    """Pays a right answer the share of forwards that it saved, and a wrong one nothing.

    This is the product of correctness and speed in arXiv 2512.09106: no speed makes up for a wrong
    answer, and slow right answers are worth little.
    """

    name = "right_and_fast"
    needs_verdict = True

    def score(self, group: Sequence[Rollout]) -> list[RewardScore]:
        return [
            RewardScore(total=one.is_correct * (1.0 - _share(one)), parts={"share": _share(one)})
            for one in group
        ]


def _share(rollout: Rollout) -> float:
    """Returns the forwards of a decode per position."""
    return rollout.trajectory.num_steps / max(rollout.trajectory.num_generated, 1)
