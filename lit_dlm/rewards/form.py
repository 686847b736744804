"""The reward of form: code that compiles."""

from __future__ import annotations

from collections.abc import Sequence

from lit_dlm.grading.code import extract_code
from lit_dlm.rewards.base import Reward, RewardScore, Rollout


class FormatReward(Reward):
    """Pays 1 for a response whose code compiles (DiffuCoder, arXiv 2506.20639), 0 for any other.

    Args:
        weight: below that of a right answer, or the form will be learnt instead of the answer.
    """

    name = "format"

    def __init__(self, *, weight: float = 0.1) -> None:
        self.weight = weight

    def score(self, group: Sequence[Rollout]) -> list[RewardScore]:
        return [RewardScore(total=float(not extract_code(r.text).problem)) for r in group]
