"""The reward of right answers: what the task itself says of a response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lit_dlm.rewards.base import Reward, RewardScore, Rollout


class Graded(Reward):
    """Pays for right answers by the verdict of the task.

    Args:
        credit: ``all`` pays 1 for a right response and 0 else; ``fraction`` pays the share of tests
            that passed, where the task counts them (once standardised within a group the same as
            their number, which dLLM-RL pays).
        weight: factor in the sum of all rewards.
    """

    name = "graded"
    needs_verdict = True

    def __init__(self, credit: Literal["all", "fraction"] = "all", *, weight: float = 1.0) -> None:
        self.credit = credit
        self.weight = weight

    def score(self, group: Sequence[Rollout]) -> list[RewardScore]:
        return [RewardScore(total=self._pay(rollout)) for rollout in group]

    def _pay(self, rollout: Rollout) -> float:
        verdict = rollout.verdict
        if verdict is None or verdict.status == "ungraded":
            raise ValueError(
                f"{rollout.trajectory.uid}: the task {rollout.example.task!r} grades nothing, so "
                "there is no verdict to pay for"
            )
        if self.credit == "fraction" and verdict.score is not None:
            return verdict.score
        return float(verdict.is_correct)
