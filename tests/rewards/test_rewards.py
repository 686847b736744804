"""What right answers, code that compiles and even filling are paid, and which groups are kept."""

from __future__ import annotations

import pytest

from lit_dlm.decoding import FixedLayout, Region
from lit_dlm.grading import Verdict
from lit_dlm.rewards import (
    FormatReward,
    Graded,
    LockstepReward,
    MeanCorrectnessFilter,
    RewardScore,
    Rollout,
    SpreadFilter,
)
from tests.rewards.groups import right, rollout, wrong


def passed(share: float | None) -> Rollout:
    status = "right" if share == 1 else "wrong"
    return rollout(verdict=Verdict(status=status, score=share))  # type: ignore[arg-type]


@pytest.mark.parametrize(("credit", "expected"), [("all", [1, 0, 0]), ("fraction", [1, 0.75, 0])])
def test_credit_for_tests_that_passed(credit: str, expected: list[float]) -> None:
    """All, three quarters and none pass."""
    group = [passed(1.0), passed(0.75), passed(None)]
    scores = Graded(credit).score(group)  # type: ignore[arg-type]
    assert [score.total for score in scores] == expected


def test_without_tests_a_fraction_is_all_or_nothing() -> None:
    assert [s.total for s in Graded("fraction").score([right(), wrong()])] == [1, 0]


@pytest.mark.parametrize("verdict", [None, Verdict(status="ungraded")])
def test_a_prompt_without_a_grader_is_an_error_with_its_name(verdict: Verdict | None) -> None:
    with pytest.raises(ValueError, match=r"sums/train/0#0: the task 'sums' grades nothing"):
        Graded().score([rollout(verdict=verdict)])


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("So:\n```python\ndef f(x):\n    return x\n```", True),
        ("```python\ndef f(x: return\n```", False),
        ("", False),
    ],
)
def test_code_must_compile(text: str, holds: bool) -> None:
    (score,) = FormatReward().score([rollout(text)])
    assert score.total == float(holds)


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


def test_even_filling_pays_more_than_one_region_after_the_other() -> None:
    """R is cells 0 and 1, A cells 2 and 3. In step: gaps 0, 0. One after the other: gaps 1, 0."""
    reward = LockstepReward(FixedLayout([Region(name="R", length=2), Region(name="A")]))
    scores = reward.score([rollout(steps=(0, 1, 0, 1)), rollout(steps=(0, 0, 1, 1))])
    assert [score.total for score in scores] == [1.0, 0.5]
    assert (reward.name, reward.weight, reward.needs_verdict) == ("lockstep", 0.1, False)


def test_a_layout_that_does_not_fit_names_the_response() -> None:
    reward = LockstepReward(FixedLayout([Region(name="R", length=9)]))
    with pytest.raises(ValueError, match="trajectory 'sums/train/0#0': layout: region 'R'"):
        reward.score([rollout(steps=(0, 1))])
