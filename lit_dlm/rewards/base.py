"""What a reward sees, what it returns, and the protocol between the two.

A *rollout* is one response to a prompt; all responses to one prompt are a *group*. Rewards see
whole groups, because some compare the responses with each other.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_dlm.config.components import Component
from lit_dlm.grading import Verdict
from lit_dlm.system.options import within
from lit_dlm.tasks import PromptExample
from lit_dlm.trajectories.record import Trajectory


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One response to a prompt, as rewards see it."""

    trajectory: Trajectory
    example: PromptExample
    text: str  # as graders take it: cut at the first end of text
    is_overlong: bool  # the response filled its budget without coming to an end
    num_tokens: int  # positions up to and including the first end of text
    decode: Callable[[Sequence[int]], str]  # turns token ids into text, as for ``text``
    verdict: Verdict | None = None  # the task's, filled in before any reward sees the rollout

    @property
    def is_correct(self) -> bool:
        return self.verdict is not None and self.verdict.is_correct


@dataclass(frozen=True, kw_only=True)
class RewardScore:
    """What one response is worth."""

    total: float  # of the whole response, before any comparison within the group
    # (G,) float32, one number per response position, already compared within the group, and paid on
    # top of ``total``; None without a process reward.
    token_rewards: NDArray[np.float32] | None = None
    parts: dict[str, float] = field(default_factory=dict)  # by reward, unweighted; for logs only
    verdict: Verdict | None = None
    is_correct: bool = False  # filters and accuracies read this, never ``total``

    @property
    def is_graded(self) -> bool:
        return self.verdict is not None and self.verdict.status != "ungraded"


class Reward(Component):
    """Scores every response of a group; the scores of a run's rewards are added up.

    A reward is a function of its arguments alone: the same group gets the same scores, whatever
    was scored before it and on however many threads.
    """

    name: str
    """Key of the reward in :attr:`RewardScore.parts`; must differ between the rewards of a run."""
    weight: float = 1.0
    needs_verdict: bool = False
    """Whether the task must have graded the rollouts first."""
    after_filters: bool = False
    """Whether it is so costly that groups which the filters drop should never reach it. Its
    ``total`` must then be 0: the filters see the same scores before and after it."""

    def setup(self, module: Any) -> None:
        """Called once before the first rollouts, with the LightningModule that makes them."""

    @abstractmethod
    def score(self, group: Sequence[Rollout]) -> list[RewardScore]:
        """Returns an unweighted score per response, in order; all have the same ``example``.

        Only ``total`` and ``token_rewards`` are read, and ``parts`` for the logs.
        """


class GroupFilter(Component):
    """Keeps or drops all responses to one prompt."""

    needs_verdict: bool = False
    """Whether it looks at correctness, so that the task must have graded the responses."""

    @abstractmethod
    def keep(self, scores: Sequence[RewardScore]) -> bool:
        """Returns whether to train on the group; ``scores`` are those of all its responses."""


class MeanCorrectnessFilter(GroupFilter):
    """Keeps prompts with a share of right responses from ``min`` to ``max`` (dLLM-RL, math)."""

    needs_verdict = True

    def __init__(self, min: float = 0.2, max: float = 0.8) -> None:
        within("[0, 1]", of="MeanCorrectnessFilter.", min=min)
        within(f"[{min}, 1]", of="MeanCorrectnessFilter.", max=max)
        self.min = min
        self.max = max

    def keep(self, scores: Sequence[RewardScore]) -> bool:
        # Of verdicts, never of rewards: a price for length would move them.
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
