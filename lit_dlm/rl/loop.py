"""The RL steps of a run: where rollouts come from, how far training is, and the step at hand."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lit_dlm.rl.metrics import RolloutValidation
from lit_dlm.rl.rollout import Report, RolloutSource
from lit_dlm.rl.settings import RolloutSettings
from lit_dlm.rl.step import START, Policy, RLProgress, RLStep, rl_step
from lit_dlm.training.ranks import ALONE, Ranks

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class RLLoop:
    """Makes one RL step after the other; it knows no trainer.

    The data module makes it and loads the batches of its steps, the module trains on them and says
    when a step is done. So neither asks the other.
    """

    policy: Policy
    source: RolloutSource
    settings: RolloutSettings
    validation: RolloutValidation | None = None  # of held-out prompts
    ranks: Ranks = ALONE
    progress: RLProgress = START  # between two steps; during a step, that before it
    _current: RLStep | None = None

    def next_step(self, *, accumulate: int, version: int, report: Report) -> RLStep:
        """Returns the step to train on next; every process must call it.

        Args:
            accumulate: batches per update.
            version: optimiser steps that the policy has taken.
            report: called with the progress of each phase.
        """
        if self.is_within_step:
            return self.current  # a trainer that resumes asks twice
        self._current = None  # no two steps in memory
        with self.policy.evaluation():
            self._current = rl_step(
                self.policy,
                self.source,
                self.settings,
                self.progress,
                accumulate=accumulate,
                version=version,
                ranks=self.ranks,
                report=report,
            )
        return self._current

    @property
    def current(self) -> RLStep:
        """The step that is trained on, or the last one that was."""
        assert self._current is not None
        return self._current

    @property
    def is_within_step(self) -> bool:
        """Whether the step at hand is not done yet."""
        return self._current is not None and self._current.number == self.progress.step

    @property
    def steps_begun(self) -> int:
        """RL steps of the whole training, with the one at hand."""
        return (self._current or self).progress.step

    def finish(self) -> None:
        """Marks the step at hand as done."""
        self.progress = self.current.progress

    def state_dict(self) -> dict[str, Any]:
        return {**asdict(self.progress), "is_within": self.is_within_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Takes over the progress; returns whether it was saved within a step.

        Rollouts are not saved, so such a step begins anew, with the policy as it is now.
        """
        state = dict(state)
        is_within = bool(state.pop("is_within", False))
        self.progress = RLProgress(**state)
        if is_within:
            logger.warning(
                "the checkpoint was taken within RL step %d: its rollouts are drawn anew by the "
                "policy as it is now; checkpoints at the end of epochs resume exactly",
                self.progress.step,
            )
        return is_within

    def close(self) -> None:
        """Ends the threads that grade."""
        self.source.close()
        if self.validation is not None:
            self.validation.close()
