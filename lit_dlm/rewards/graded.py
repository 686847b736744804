"""The reward of right answers: what the task itself says of a response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lit_dlm.rewards.base import Reward, RewardScore, Rollout

Credit = Literal["all", "fraction", "tests"]


class Graded(Reward):
    """Pays for right answers by the verdict of the task.

    Args:
        credit: ``all`` pays 1 for a right response and 0 else; ``fraction`` pays the share of tests
            that passed, where the task counts them; ``tests`` pays their number (dLLM-RL), the same
            as ``fraction`` once rewards are standardised within a group.
        weight: factor in the sum of all rewards.
    """

    name = "graded"
    needs_verdict = True

    def __init__(self, credit: Credit = "all", *, weight: float = 1.0) -> None:
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
        share = float(verdict.is_correct)
        if self.credit != "all" and verdict.score is not None:
            share = verdict.score
        if self.credit == "tests":
            share *= _num_tests(rollout)
        return share


def _num_tests(rollout: Rollout) -> int:
    for key in ("test_list", "test_input"):
        tests = rollout.example.reference.get(key)
        if isinstance(tests, list) and tests:
            return len(tests)
    raise ValueError(
        f"{rollout.example.uid}: credit 'tests' needs a problem with a list of tests "
        "('test_list' or 'test_input'); use 'fraction' or 'all'"
    )
