"""Rewards for few forwards, for policies that decide what a step commits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lit_dlm.rewards.base import Reward, RewardScore, Rollout
from lit_dlm.system.options import at_least, within


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


@dataclass(frozen=True, kw_only=True)
class PriceConstraint:
    """Halves the price of a forward while an accuracy of validation is below that of the start."""

    margin: float = 0.01
    """How much less than at the start an accuracy may be."""

    def __post_init__(self) -> None:
        within("[0, inf)", of="constraint.", margin=self.margin)

    def next(
        self, price: float, start: Mapping[str, float], now: Mapping[str, float], *, most: float
    ) -> float:
        """Returns the price after a validation, ``most`` at most; accuracies are by name."""
        # A run may go on with other windows than it began with. 1e-9 is for rounding.
        holds = all(now[name] >= start[name] - self.margin - 1e-9 for name in now.keys() & start)
        return min(2 * price, most) if holds else price / 2


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
