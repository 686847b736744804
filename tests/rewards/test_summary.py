"""What is logged of scores."""

from __future__ import annotations

from lit_dlm.grading import Verdict
from lit_dlm.rewards import RewardScore, summarise
from lit_dlm.rewards.rewarder import OVERLONG


def score(total: float, status: str, **fields: object) -> RewardScore:
    verdict = Verdict(status=status, detail=str(fields.pop("detail", "")))  # type: ignore[arg-type]
    return RewardScore(
        total=total,
        verdict=verdict,
        is_correct=verdict.is_correct,
        **fields,  # type: ignore[arg-type]
    )


def test_shares_and_means() -> None:
    """Totals 1, 0 | 0, 0, 0: mean 1/5, deviations 0.5 and 0, mean 0.25."""
    groups = [
        [score(1, "right", parts={"graded": 1.0}), score(0, "timeout", parts={"graded": 0.0})],
        [
            score(0, "no_answer"),
            score(0, "syntax_error"),
            score(0, "wrong", detail=OVERLONG, parts={"process": -1.0}),
        ],
    ]
    assert summarise(groups) == {
        "mean": 0.2,
        "group_std": 0.25,
        "correct": 0.2,
        "timeout": 0.2,
        "no_answer": 0.4,
        "overlong": 0.2,
        "part/graded": 0.5,
        "part/process": -1.0,
    }
    assert summarise([]) == {}
    assert summarise([[]]) == {}
