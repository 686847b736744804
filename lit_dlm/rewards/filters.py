"""Which groups are worth training on: equal rewards have no advantage to learn from."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from lit_dlm.ops.options import within
from lit_dlm.plugs import Plug
from lit_dlm.rewards.base import RewardScore


class GroupFilter(Plug):
    """Keeps or drops all responses to one prompt."""

    needs_verdict: bool = False
    """Whether it looks at what is right, so that the task must have graded the responses."""

    @abstractmethod
    def keep(self, scores: Sequence[RewardScore]) -> bool:
        """Whether the group, of which these are all scores, is trained on."""


class MeanCorrectnessFilter(GroupFilter):
    """Keeps prompts whose share of right responses is from ``min`` to ``max`` (dLLM-RL, math)."""

    needs_verdict = True

    def __init__(self, min: float = 0.2, max: float = 0.8) -> None:
        within("[0, 1]", of="MeanCorrectnessFilter.", min=min)
        within(f"[{min}, 1]", of="MeanCorrectnessFilter.", max=max)
        self.min = min
        self.max = max

    def keep(self, scores: Sequence[RewardScore]) -> bool:
        num_right = sum(score.is_correct for score in scores)
        # In whole responses: 0.2 of 15 is 3 responses, although 3 / 15 rounds to less than 0.2.
        num = len(scores)
        return self.min * num <= num_right + 1e-9 and num_right <= self.max * num + 1e-9


class SpreadFilter(GroupFilter):
    """Keeps groups whose rewards differ at all (dLLM-RL, code; dynamic sampling in general)."""

    def keep(self, scores: Sequence[RewardScore]) -> bool:
        totals = np.array([score.total for score in scores], dtype=np.float64)
        # Equal numbers can have a tiny spread after rounding, but never a range.
        return bool(len(totals) and np.ptp(totals) > 0 and totals.std() > 0)
