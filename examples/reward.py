"""A reward of your own: pays right answers more, the fewer forwards their decode took.

In the folder of this file, add these lines to an experiment with ``RolloutDataModule``::

    data:
      init_args:
        rewards:
        - {class_path: reward.FewSteps, init_args: {weight: 1.0}}
"""

from __future__ import annotations

from collections.abc import Sequence

from lit_dlm.rewards.base import RewardScore, Rollout


class FewSteps:
    """Pays a right response the share of its tokens that needed no forward of their own.

    Args:
        weight: factor in the sum of all rewards.
    """

    name = "few_steps"
    needs_verdict = True

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight

    def score(self, group: Sequence[Rollout]) -> list[RewardScore]:
        """Returns ``1 - forwards / cells`` for right responses, 0 for the others."""
        return [RewardScore(total=self._saved(rollout)) for rollout in group]

    def _saved(self, rollout: Rollout) -> float:
        record = rollout.trajectory
        return rollout.is_correct * (1.0 - record.num_steps / record.num_generated)
