"""What a reward sees, what it returns, and the protocol between the two.

A *rollout* is one response to a prompt, all G responses to one prompt are a *group*. Rewards see
whole groups, because some compare the responses with each other.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lit_dlm.grading import Verdict
from lit_dlm.plugs import Plug
from lit_dlm.tasks import PromptExample
from lit_dlm.trajectories.record import Trajectory


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One response to a prompt, as rewards see it."""

    trajectory: Trajectory
    example: PromptExample
    text: str  # as graders take it: cut at the first end of text
    is_overlong: bool  # the response filled its budget without coming to an end
    num_tokens: int  # up to and including the first end of text
    decode: Callable[[Sequence[int]], str]  # makes text of token ids, as ``text`` was made
    verdict: Verdict | None = None  # the task's, filled in before any reward sees the rollout

    @property
    def is_correct(self) -> bool:
        return self.verdict is not None and self.verdict.is_correct


@dataclass(frozen=True, kw_only=True)
class RewardScore:
    """What one response is worth."""

    total: float  # of the whole response, before any comparison within the group
    # (G,) float32, one number per response cell, already compared within the group, which comes on
    # top of ``total``; None without a process reward.
    token_rewards: NDArray[np.float32] | None = None
    parts: dict[str, float] = field(default_factory=dict)  # by reward, unweighted; for logs only
    verdict: Verdict | None = None
    is_correct: bool = False  # filters and accuracies read this, never ``total``

    @property
    def is_graded(self) -> bool:
        return self.verdict is not None and self.verdict.status != "ungraded"


class Reward(Plug):
    """Gives every response of a group its share of the reward.

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

    @abstractmethod
    def score(self, group: Sequence[Rollout]) -> list[RewardScore]:
        """One unweighted score for each response, in order; all have the same ``example``.

        Only ``total`` and ``token_rewards`` are read, and ``parts`` for the logs.
        """
