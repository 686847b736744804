"""Which groups are kept."""

from __future__ import annotations

import pytest

from lit_dlm.rewards import MeanCorrectnessFilter, RewardScore, SpreadFilter


def scores(totals: list[float], *, num_right: int = 0) -> list[RewardScore]:
    return [RewardScore(total=t, is_correct=i < num_right) for i, t in enumerate(totals)]


@pytest.mark.parametrize("num", [5, 10, 15, 35, 40])
def test_bounds_of_the_mean_are_inclusive_for_every_group_size(num: int) -> None:
    """A fifth and four fifths of the group are inside, one response more or less is outside."""
    keep = MeanCorrectnessFilter(0.2, 0.8).keep
    for num_right in range(num + 1):
        inside = 5 * num_right >= num and 5 * num_right <= 4 * num
        assert keep(scores([0.0] * num, num_right=num_right)) is inside


@pytest.mark.parametrize(
    ("totals", "kept"),
    [
        ([1, 0], True),
        ([1, 1, 1], False),
        ([0.1] * 7, False),
        ([0.1] * 6 + [0.2], True),
        ([1], False),
    ],
)
def test_equal_rewards_have_no_spread(totals: list[float], kept: bool) -> None:
    assert SpreadFilter().keep(scores(totals)) is kept
