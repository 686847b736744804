"""Verdicts, weights and filters put together."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from lit_dlm.grading import SandboxError, launch
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
        return [
            RewardScore(
                total=0.0,
                token_rewards=np.arange(3, dtype=np.float32),
                parts={"share_raw": float(len(r.text))},
            )
            for r in group
        ]


def test_totals_are_weighted_sums_and_parts_stay_unweighted() -> None:
    """Right and boxed 2 * 1 + 0.5 * 1, wrong and boxed 0.5, wrong and bare 0."""
    task = Sums()
    group = [rollout("7", number=0), rollout(r"\boxed{8}", number=1), rollout("8", number=2)]
    example = PromptExample(uid="b", task="sums", text="", reference={"answer": r"\boxed{1}"})
    boxed = rollout(r"\boxed{1}", example=example)
    rewards = [Graded(weight=2.0), Boxed()]
    rewarder = Rewarder(rewards, {"sums": task})
    scores = rewarder.score([group, [boxed]])
    rewarder.close()
    assert [s.total for s in scores[0]] == [2.0, 0.5, 0.0]
    assert scores[1][0].total == 2.5
    assert scores[1][0].parts == {"graded": 1.0, "boxed": 1.0}
    assert [s.is_correct for s in scores[0]] == [True, False, False]
    assert scores[0][0].token_rewards is None
    assert scores[0][1].verdict is not None
    assert scores[0][1].verdict.answer == r"\boxed{8}"


def test_equal_responses_are_graded_once_and_the_order_does_not_matter() -> None:
    task = Sums()
    texts = ["7", "8", "7", "9", "8"]
    groups = [[rollout(text, number=i) for i, text in enumerate(texts)]]
    rewarder = Rewarder([Graded()], {"sums": task}, num_workers=3)
    scores = rewarder.score(groups)[0]
    again = rewarder.score([groups[0][::-1]])[0]
    rewarder.close()
    assert sorted(task.graded[:3]) == ["7", "8", "9"]
    assert scores == again[::-1]
    assert threading.current_thread().name not in task.threads


def test_problems_of_one_uid_are_graded_by_their_own_references() -> None:
    other = PromptExample(uid=SUM.uid, task="sums", text="4+4?", reference={"answer": "8"})
    task = Sums()
    rewarder = Rewarder([Graded()], {"sums": task})
    scores = rewarder.score([[rollout("7")], [rollout("7", example=other)]])
    rewarder.close()
    assert [[score.total for score in group] for group in scores] == [[1.0], [0.0]]


def test_an_overlong_response_is_wrong_unread_unless_told_otherwise() -> None:
    task = Sums()
    group = [rollout("7", is_overlong=True)]
    strict = Rewarder([Graded()], {"sums": task})
    assert strict.score([group])[0][0].total == 0
    assert task.graded == []
    lenient = Rewarder([Graded()], {"sums": task}, overlong_is_wrong=False)
    assert lenient.score([group])[0][0].is_correct


def test_rewards_after_the_filters_see_only_groups_that_pass() -> None:
    """One of two right passes 0.2 to 0.8, none of two does not."""
    other = PromptExample(uid="sums/train/1", task="sums", text="", reference={"answer": "1"})
    groups = [
        [rollout("7"), rollout("8", number=1)],
        [rollout("7", example=other), rollout("8", example=other, number=1)],
    ]
    late = TokenShare(weight=2.0)
    rewarder = Rewarder([late, Graded()], {"sums": Sums()}, filters=[MeanCorrectnessFilter()])
    scores = rewarder.score(groups)
    assert late.groups == ["sums/train/0"]
    for score in scores[0]:
        np.testing.assert_array_equal(score.token_rewards, np.float32([0, 2, 4]))
        assert score.parts["share_raw"] == 1.0
    assert scores[1][0].token_rewards is None
    assert scores[1][0].parts == {"graded": 0.0}


def test_rewards_per_token_add_up_by_weight() -> None:
    """1 * [0, 1, 2] - 3 * [0, 1, 2] = [0, -2, -4]."""
    rewards = [TokenShare("a"), TokenShare("b", weight=-3.0)]
    (score,) = Rewarder(rewards, {"sums": Sums()}).score([[rollout("7")]])[0]
    np.testing.assert_array_equal(score.token_rewards, np.float32([0, -2, -4]))


def test_without_a_reward_that_needs_verdicts_nothing_is_graded() -> None:
    task = Sums()
    (score,) = Rewarder([Boxed()], {"sums": task}).score([[rollout(r"\boxed{7}")]])[0]
    assert (score.total, score.verdict, task.graded) == (0.5, None, [])


def test_a_filter_that_looks_at_what_is_right_has_it_graded() -> None:
    """One right of two is kept, although the reward looks at the format only."""
    task = Sums()
    keep = MeanCorrectnessFilter()
    rewarder = Rewarder([Boxed()], {"sums": task}, filters=[keep])
    (scores,) = rewarder.score([[rollout("7", number=0), rollout("8", number=1)]])
    rewarder.close()
    assert [score.is_correct for score in scores] == [True, False]
    assert all(score.is_graded for score in scores)
    assert keep.keep(scores)


def test_no_group_and_an_empty_group_are_nothing_to_score() -> None:
    rewarder = Rewarder([Graded(), TokenShare(late=False)], {"sums": Sums()})
    assert rewarder.score([]) == []


@pytest.mark.parametrize(("text", "kind"), [("broken", ValueError), ("no sandbox", SandboxError)])
def test_a_grader_that_fails_names_the_sample(text: str, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=rf"^sums/train/0#4: .*{'number' if kind is ValueError else ''}"):
        Rewarder([Graded()], {"sums": Sums()}).score([[rollout(text, number=4)]])


def test_rewards_that_wait_for_others_see_all_groups_at_the_same_time() -> None:
    """Each of four calls waits until all four groups have arrived."""
    met = threading.Barrier(4)

    class Meeting(TokenShare):
        def score(self, group: Sequence[Rollout]) -> list[RewardScore]:
            met.wait(timeout=10)
            return super().score(group)

    rewarder = Rewarder([Meeting()], {"sums": Sums()})
    groups = [[rollout("7" * length)] for length in (1, 2, 3, 4)]
    found = rewarder.score(groups)
    assert [score.parts["share_raw"] for (score,) in found] == [1, 2, 3, 4]
    rewarder.close()


def test_code_needs_namespaces_unless_less_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Allowed(Runs):
        allow_code_execution = True

    monkeypatch.setattr(launch, "isolation_method", lambda: "landlock")
    message = "require_isolation: expected namespaces, got landlock, which is all that this machine"
    with pytest.raises(ValueError, match=message):
        Rewarder([Graded()], {"runs": Allowed()})
    Rewarder([Graded()], {"runs": Allowed()}, require_isolation="landlock").close()
    monkeypatch.setattr(launch, "isolation_method", lambda: "bubblewrap")
    Rewarder([Graded()], {"runs": Allowed()}).close()
    Rewarder([Graded()], {"sums": Sums()}).close()
