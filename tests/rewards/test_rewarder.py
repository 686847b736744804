"""Verdicts, weights and filters put together."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from lit_dlm.grading import SandboxError, sandbox
from lit_dlm.rewards import (
    Graded,
    MeanCorrectnessFilter,
    Reward,
    Rewarder,
    RewardScore,
    Rollout,
)
from lit_dlm.tasks import PromptExample
from tests.rewards.groups import SUM, Runs, Sums, rollout

OTHER = PromptExample(uid="sums/train/1", task="sums", text="", reference={"answer": "1"})


class Boxed(Reward):
    """Pays for a box."""

    name = "boxed"
    weight = 0.5

    def score(self, group: Sequence[Rollout]) -> list[RewardScore]:
        return [RewardScore(total=float("boxed" in one.text)) for one in group]


class TokenShare(Reward):
    """Pays by the text's length and per token, and comes after the filters."""

    needs_verdict = True

    def __init__(self, name: str = "share", *, weight: float = 1.0, late: bool = True) -> None:
        self.name = name
        self.weight = weight
        self.after_filters = late
        self.groups: list[str] = []

    def score(self, group: Sequence[Rollout]) -> list[RewardScore]:
        self.groups.append(group[0].example.uid)
        paid, lengths = np.arange(3, dtype=np.float32), [len(one.text) for one in group]
        return [
            RewardScore(total=0.0, token_rewards=paid, parts={"share_raw": float(length)})
            for length in lengths
        ]


def scored(
    *groups: Sequence[Rollout], rewards: Sequence[Reward] = (), task: Any = None, **options: Any
) -> list[list[RewardScore]]:
    rewarder = Rewarder(rewards or [Graded()], {"sums": task or Sums()}, **options)
    found = rewarder.score(groups)
    rewarder.close()
    return found


def answers(*texts: str, example: PromptExample = SUM, **fields: Any) -> list[Rollout]:
    return [rollout(text, number=n, example=example, **fields) for n, text in enumerate(texts)]


def test_totals_are_weighted_sums_and_parts_stay_unweighted() -> None:
    """Right and boxed 2 * 1 + 0.5 * 1, wrong and boxed 0.5, wrong and bare 0."""
    example = PromptExample(uid="b", task="sums", text="", reference={"answer": r"\boxed{1}"})
    first, (boxed,) = scored(
        answers("7", r"\boxed{8}", "8"),
        answers(r"\boxed{1}", example=example),
        rewards=[Graded(weight=2.0), Boxed()],
    )
    assert [s.total for s in first] == [2.0, 0.5, 0.0]
    assert boxed.total == 2.5
    assert boxed.parts == {"graded": 1.0, "boxed": 1.0}
    assert [s.is_correct for s in first] == [True, False, False]
    assert first[0].token_rewards is None
    assert first[1].verdict is not None
    assert first[1].verdict.answer == r"\boxed{8}"


def test_equal_responses_are_graded_once_and_the_order_does_not_matter() -> None:
    task, group = Sums(), answers("7", "8", "7", "9", "8")
    (scores,) = scored(group, task=task, num_workers=3)
    assert sorted(task.graded) == ["7", "8", "9"]
    assert scored(group[::-1]) == [scores[::-1]]
    assert threading.current_thread().name not in task.threads


def test_problems_of_one_uid_are_graded_by_their_own_references() -> None:
    other = PromptExample(uid=SUM.uid, task="sums", text="4+4?", reference={"answer": "8"})
    scores = scored(answers("7"), answers("7", example=other))
    assert [[score.total for score in group] for group in scores] == [[1.0], [0.0]]


def test_an_overlong_response_is_wrong_unread_unless_told_otherwise() -> None:
    task, group = Sums(), answers("7", is_overlong=True)
    assert scored(group, task=task)[0][0].total == 0
    assert task.graded == []
    assert scored(group, overlong_is_wrong=False)[0][0].is_correct


def test_rewards_after_the_filters_see_only_groups_that_pass() -> None:
    """One of two right passes 0.2 to 0.8, none of two does not."""
    late = TokenShare(weight=2.0)
    kept, dropped = scored(
        answers("7", "8"),
        answers("7", "8", example=OTHER),
        rewards=[late, Graded()],
        filters=[MeanCorrectnessFilter()],
    )
    assert late.groups == ["sums/train/0"]
    for score in kept:
        np.testing.assert_array_equal(score.token_rewards, np.float32([0, 2, 4]))
        assert score.parts["share_raw"] == 1.0
    assert dropped[0].token_rewards is None
    assert dropped[0].parts == {"graded": 0.0}


def test_rewards_per_token_add_up_by_weight() -> None:
    """1 * [0, 1, 2] - 3 * [0, 1, 2] = [0, -2, -4]."""
    rewards = [TokenShare("a"), TokenShare("b", weight=-3.0, late=False)]
    ((score,),) = scored(answers("7"), rewards=rewards)
    np.testing.assert_array_equal(score.token_rewards, np.float32([0, -2, -4]))


def test_only_what_needs_verdicts_has_responses_graded() -> None:
    """A filter that looks at what is right keeps one of two, although the reward does not look."""
    task, keep = Sums(), MeanCorrectnessFilter()
    ((score,),) = scored(answers(r"\boxed{7}"), rewards=[Boxed()], task=task)
    assert (score.total, score.verdict, task.graded) == (0.5, None, [])
    (scores,) = scored(answers("7", "8"), rewards=[Boxed()], filters=[keep])
    assert [score.is_correct for score in scores] == [True, False]
    assert all(score.is_graded for score in scores)
    assert keep.keep(scores)


def test_no_group_is_nothing_to_score() -> None:
    assert scored(rewards=[Graded(), TokenShare()]) == []


@pytest.mark.parametrize(("text", "kind"), [("broken", ValueError), ("no sandbox", SandboxError)])
def test_a_grader_that_fails_names_the_sample(text: str, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=rf"^sums/train/0#4: .*{'number' if kind is ValueError else ''}"):
        scored([rollout(text, number=4)])


def test_rewards_that_wait_for_others_see_all_groups_at_the_same_time() -> None:
    """Each of four calls waits until all four groups have arrived."""
    met = threading.Barrier(4)

    class Meeting(TokenShare):
        def score(self, group: Sequence[Rollout]) -> list[RewardScore]:
            met.wait(timeout=10)
            return super().score(group)

    found = scored(*(answers("7" * length) for length in (1, 2, 3, 4)), rewards=[Meeting()])
    assert [score.parts["share_raw"] for (score,) in found] == [1, 2, 3, 4]


def test_code_needs_namespaces_unless_less_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Allowed(Runs):
        allow_code_execution = True

    monkeypatch.setattr(sandbox, "isolation_method", lambda: "landlock")
    with pytest.raises(ValueError, match="require_isolation: expected namespaces, got landlock"):
        scored(task=Allowed())
    assert scored(task=Allowed(), require_isolation="landlock") == []
    monkeypatch.setattr(sandbox, "isolation_method", lambda: "bubblewrap")
    assert scored(task=Allowed()) == []
