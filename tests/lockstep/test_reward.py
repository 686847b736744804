import pytest

from lit_dlm.decoding import FixedLayout, Region
from lit_dlm.lockstep import LockstepReward
from tests.rewards.groups import rollout


def test_even_filling_pays_more_and_a_layout_must_fit():
    """R is cells 0 and 1, A cells 2 and 3. In step: gaps 0, 0. One after the other: gaps 1, 0."""
    reward = LockstepReward(FixedLayout([Region(name="R", length=2), Region(name="A")]))
    scores = reward.score([rollout(steps=(0, 1, 0, 1)), rollout(steps=(0, 0, 1, 1))])
    assert [score.total for score in scores] == [1.0, 0.5]
    assert (reward.name, reward.weight, reward.needs_verdict) == ("lockstep", 0.1, False)
    reward = LockstepReward(FixedLayout([Region(name="R", length=9)]))
    with pytest.raises(ValueError, match="trajectory 'sums/train/0#0': layout: region 'R'"):
        reward.score([rollout(steps=(0, 1))])
