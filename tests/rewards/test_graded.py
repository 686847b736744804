"""What right answers are paid."""

from __future__ import annotations

import pytest

from lit_dlm.grading import Verdict
from lit_dlm.rewards import Graded, Rollout
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
