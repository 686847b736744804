"""A reward for how evenly the regions of a response were filled: the coupling bonus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lit_dlm.decoding.layout import Layout
from lit_dlm.rewards.base import Reward, RewardScore, Rollout
from lit_dlm.trajectories.regions import fill_curves_of, regions_of


class LockstepReward(Reward):
    """Pays the lockstep score of a response, 0 to 1.

    The configuration of the Dream-7B Lockstep R/A release names a ``coupling_bonus`` of 0.1 and
    never defines it; here it is this score times the weight. It rewards *how* a response was
    decoded and not *what* it says, so it can only be a small addition to another reward.

    Args:
        layout: the regions; those of the decoder that rolls out.
        weight: factor in the sum of all rewards.
    """

    name = "lockstep"

    def __init__(self, layout: Layout, *, weight: float = 0.1) -> None:
        self.layout = layout
        self.weight = weight

    def setup(self, module: Any) -> None:
        self.layout = self.layout.encoded(module.marker_ids)

    def score(self, group: Sequence[Rollout]) -> list[RewardScore]:
        return [RewardScore(total=self._pay(rollout)) for rollout in group]

    def _pay(self, rollout: Rollout) -> float:
        regions = regions_of(rollout.trajectory, self.layout)
        assert regions is not None
        return fill_curves_of(rollout.trajectory, regions).lockstep_score()
