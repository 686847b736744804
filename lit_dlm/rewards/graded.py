"""Rewards for right answers, as the task grades them, and for code that compiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lit_dlm.grading.code import extract_code
from lit_dlm.rewards.base import Reward, RewardScore, Rollout


class Graded(Reward):
    """Pays for right answers, according to the task's verdict.

    Args:
        credit: ``all`` pays 1 for a right response, else 0; ``fraction`` pays the share of tests
            that passed, where the task counts them (dLLM-RL pays their number, which is the same
            once standardised within a group).
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
        # A verdict without a score was not made of tests: it is right or wrong as a whole.
        if self.credit == "fraction" and verdict.score is not None:
            return verdict.score
        return float(verdict.is_correct)


class FormatReward(Reward):
    """Pays 1 for a response whose code compiles (DiffuCoder, arXiv 2506.20639), 0 for any other.

    Args:
        weight: factor; keep it below that of right answers, or the form is learnt instead of them.
    """

    name = "format"

    def __init__(self, *, weight: float = 0.1) -> None:
        self.weight = weight

    def score(self, group: Sequence[Rollout]) -> list[RewardScore]:
        # What follows the start of an answer that the prompt already holds is code only with it.
        answers = (rollout.example.answer_start + rollout.text for rollout in group)
        return [RewardScore(total=float(not extract_code(text).reason)) for text in answers]
