"""What right answers and code that compiles are paid, and which groups are kept."""

from dataclasses import replace

import pytest

from lit_dlm.grading import Verdict
from lit_dlm.rewards import (
    FormatReward,
    Graded,
    MeanCorrectnessFilter,
    RewardScore,
    SpreadFilter,
)
from lit_dlm.rewards.speed import ForwardPrice, RightAndFast
from tests.rewards.groups import SUM, right, rollout, wrong


@pytest.mark.parametrize(("credit", "expected"), [("all", [1, 0, 0]), ("fraction", [1, 0.75, 0])])
def test_credit_for_tests_that_passed(credit: str, expected: list[float]):
    """All, three quarters and none pass; without tests it is all or nothing."""
    verdicts = [("right", 1.0), ("wrong", 0.75), ("wrong", None)]
    group = [rollout(verdict=Verdict(status=status, score=share)) for status, share in verdicts]
    assert [score.total for score in Graded(credit).score(group)] == expected
    assert [score.total for score in Graded(credit).score([right(), wrong()])] == [1, 0]


@pytest.mark.parametrize("verdict", [None, Verdict(status="ungraded")])
def test_a_prompt_without_a_grader_is_an_error_with_its_name(verdict: Verdict | None):
    with pytest.raises(ValueError, match=r"sums/train/0#0: the task 'sums' grades nothing"):
        Graded().score([rollout(verdict=verdict)])


def test_code_must_compile():
    texts = ["So:\n```python\ndef f(x):\n    return x\n```", "```python\ndef f(x: return\n```", ""]
    found = FormatReward().score([rollout(text) for text in texts])
    assert [score.total for score in found] == [1.0, 0.0, 0.0]
    example = replace(SUM, answer_start="```python\n")
    begun = rollout("def f(x):\n    return x\n```\nThis is f.", example=example)
    assert FormatReward().score([begun])[0].total == 1.0


def test_a_price_is_paid_for_every_forward_and_the_product_only_for_right_answers():
    """Two forwards for four cells save half of them."""
    group = [right(steps=(0, 1, 0, 1)), wrong(steps=(0, 1, 2, 3))]
    assert [score.total for score in ForwardPrice(0.5).score(group)] == [-1.0, -2.0]
    assert [score.total for score in RightAndFast().score(group)] == [0.5, 0.0]
    with pytest.raises(ValueError, match="price"):
        ForwardPrice(-0.1)


def scores(totals: list[float], *, num_right: int = 0) -> list[RewardScore]:
    return [RewardScore(total=t, is_correct=i < num_right) for i, t in enumerate(totals)]


@pytest.mark.parametrize("num", [5, 10, 15, 35, 40])
def test_bounds_of_the_mean_are_inclusive_for_every_group_size(num: int):
    """A fifth and four fifths of the group are inside, one response more or less is outside."""
    keep = MeanCorrectnessFilter(0.2, 0.8).keep
    for num_right in range(num + 1):
        inside = 5 * num_right >= num and 5 * num_right <= 4 * num
        assert keep(scores([0.0] * num, num_right=num_right)) is inside


def test_equal_rewards_have_no_spread():
    for totals in ([1, 0], [0.1] * 6 + [0.2]):
        assert SpreadFilter().keep(scores(totals))
    for totals in ([1, 1, 1], [0.1] * 7, [1]):
        assert not SpreadFilter().keep(scores(totals))
