"""Verdicts, weights and filters put together, and what rewards refuse."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from lit_dlm.grading import SandboxError, sandbox
from lit_dlm.rewards import (
    Graded,
    HttpStepJudge,
    MeanCorrectnessFilter,
    ProcessReward,
    Reward,
    Rewarder,
    RewardScore,
    Rollout,
)
from lit_dlm.tasks import PromptExample
from tests.rewards.groups import SUM, Sums, Table, rollout

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
        self.name, self.weight, self.after_filters = name, weight, late
        self.groups: list[str] = []

    def score(self, group: Sequence[Rollout]) -> list[RewardScore]:
        self.groups.append(group[0].example.uid)
        paid = np.arange(3, dtype=np.float32)
        parts = [{"share_raw": float(len(one.text))} for one in group]
        return [RewardScore(total=0.0, token_rewards=paid, parts=own) for own in parts]


def scored(
    *groups: Sequence[Rollout], rewards: Sequence[Reward] = (), task: Any = None, **options: Any
) -> list[list[RewardScore]]:
    rewarder = Rewarder(rewards or [Graded()], {"sums": task or Sums()}, **options)
    found = rewarder.score(groups)
    rewarder.close()
    return found


def answers(*texts: str, **fields: Any) -> list[Rollout]:
    return [rollout(text, number=number, **fields) for number, text in enumerate(texts)]


def test_totals_are_weighted_sums_and_parts_stay_unweighted():
    """Right and boxed 2 * 1 + 0.5 * 1, wrong and boxed 0.5, wrong and bare 0."""
    example = PromptExample(uid="b", task="sums", text="", reference={"answer": r"\boxed{1}"})
    groups = answers("7", r"\boxed{8}", "8"), answers(r"\boxed{1}", example=example)
    first, (boxed,) = scored(*groups, rewards=[Graded(weight=2.0), Boxed()])
    assert [(s.total, s.is_correct) for s in first] == [(2.0, True), (0.5, False), (0.0, False)]
    assert (boxed.total, boxed.parts) == (2.5, {"graded": 1.0, "boxed": 1.0})
    assert first[0].token_rewards is None
    assert first[1].verdict.answer == r"\boxed{8}"


def test_equal_responses_are_graded_once_and_the_order_does_not_matter():
    task, group = Sums(), answers("7", "8", "7", "9", "8")
    (scores,) = scored(group, task=task, num_workers=3)
    assert sorted(task.graded) == ["7", "8", "9"]
    assert scored(group[::-1]) == [scores[::-1]]
    assert threading.current_thread().name not in task.threads


def test_problems_of_one_uid_are_graded_by_their_own_references():
    other = PromptExample(uid=SUM.uid, task="sums", text="4+4?", reference={"answer": "8"})
    scores = scored(answers("7"), answers("7", example=other))
    assert [[score.total for score in group] for group in scores] == [[1.0], [0.0]]


def test_an_overlong_response_is_wrong_unread_unless_told_otherwise():
    task, group = Sums(), answers("7", is_overlong=True)
    assert (scored(group, task=task)[0][0].total, task.graded) == (0, [])
    assert scored(group, overlong_is_wrong=False)[0][0].is_correct
    ((score,),) = scored(group, rewards=[TokenShare()], task=Sums(is_graded=False))
    assert not score.is_graded


def test_rewards_after_the_filters_see_only_groups_that_pass():
    """One of two right passes 0.2 to 0.8, none of two does not."""
    late = TokenShare(weight=2.0)
    groups = answers("7", "8"), answers("7", "8", example=OTHER)
    filters = [MeanCorrectnessFilter()]
    kept, dropped = scored(*groups, rewards=[late, Graded()], filters=filters)
    assert late.groups == ["sums/train/0"]
    for score in kept:
        np.testing.assert_array_equal(score.token_rewards, np.float32([0, 2, 4]))
        assert score.parts["share_raw"] == 1.0
    assert (dropped[0].token_rewards, dropped[0].parts) == (None, {"graded": 0.0})
    assert scored(rewards=[Graded(), late]) == []


def test_rewards_per_token_add_up_by_weight():
    """1 * [0, 1, 2] - 3 * [0, 1, 2] = [0, -2, -4]."""
    rewards = [TokenShare("a"), TokenShare("b", weight=-3.0, late=False)]
    ((score,),) = scored(answers("7"), rewards=rewards)
    np.testing.assert_array_equal(score.token_rewards, np.float32([0, -2, -4]))


def test_only_what_needs_verdicts_has_responses_graded():
    """A filter that looks at what is right keeps one of two, although the reward does not look."""
    task, keep = Sums(), MeanCorrectnessFilter()
    ((score,),) = scored(answers(r"\boxed{7}"), rewards=[Boxed()], task=task)
    assert (score.total, score.verdict, task.graded) == (0.5, None, [])
    (scores,) = scored(answers("7", "8"), rewards=[Boxed()], filters=[keep])
    assert [(score.is_correct, score.is_graded) for score in scores] == [
        (True, True),
        (False, True),
    ]
    assert keep.keep(scores)


@pytest.mark.parametrize(
    ("text", "kind", "told"),
    [("broken", ValueError, "number"), ("no sandbox", SandboxError, "process")],
)
def test_a_grader_that_fails_names_the_sample(text: str, kind: type[Exception], told: str):
    with pytest.raises(kind, match=rf"^sums/train/0#4: .*{told}"):
        scored([rollout(text, number=4)])


def test_rewards_that_wait_for_others_see_all_groups_at_the_same_time():
    """Each of four calls waits until all four groups have arrived."""
    met = threading.Barrier(4)

    class Meeting(TokenShare):
        def score(self, group: Sequence[Rollout]) -> list[RewardScore]:
            met.wait(timeout=10)
            return super().score(group)

    found = scored(*(answers("7" * length) for length in (1, 2, 3, 4)), rewards=[Meeting()])
    assert [score.parts["share_raw"] for (score,) in found] == [1, 2, 3, 4]


def test_code_needs_namespaces_unless_less_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    code = Sums(runs_code=True, allow_code_execution=True)
    monkeypatch.setattr(sandbox, "isolation_method", lambda: "landlock")
    with pytest.raises(ValueError, match="require_isolation: expected namespaces, got landlock"):
        scored(task=code)
    assert scored(task=code, require_isolation="landlock") == []
    monkeypatch.setattr(sandbox, "isolation_method", lambda: "bubblewrap")
    assert scored(task=code) == []


class Bad(Reward):
    name = "bad"

    def __init__(self, *scores: RewardScore) -> None:
        self.scores = scores

    def score(self, group: Sequence[Rollout]) -> list[RewardScore]:
        return [*self.scores]


def bad(*scores: RewardScore) -> object:
    return scored(answers("7"), rewards=[Bad(*scores)])


def judge(url: str = "http://x", **options: Any) -> HttpStepJudge:
    return HttpStepJudge(url=url, model="m", **options)


LONG = RewardScore(total=0.0, token_rewards=np.zeros(4, dtype=np.float32))
REFUSED: dict[str, Callable[[], object]] = {
    "^rewards: expected at least 1": lambda: Rewarder([], {}),
    "names must differ, got graded, graded": lambda: scored(rewards=[Graded(), Graded()]),
    "num_workers": lambda: scored(num_workers=0),
    "allow_code_execution": lambda: scored(task=Sums(runs_code=True)),
    "MeanCorrectnessFilter looks .* task 'sums'": lambda: scored(
        task=Sums(is_graded=False), filters=[MeanCorrectnessFilter()]
    ),
    "sums/train/0: reward 'bad' gave 0 scores": bad,
    "reward 'bad': expected a RewardScore for each response, got 1.0": lambda: bad(1.0),  # type: ignore[arg-type]
    "sums/train/0#0: reward 'bad' .* got nan": lambda: bad(RewardScore(total=float("nan"))),
    r"sums/train/0#0: reward 'bad' .* shape \(3,\)": lambda: bad(LONG),
    "reward_chunk_length": lambda: ProcessReward(Table(), reward_chunk_length=0),
    "k_sample": lambda: ProcessReward(Table(), k_sample=0),
    "block_size": lambda: ProcessReward(Table(), block_size=0),
    "^url": lambda: judge("localhost"),
    "^deadline_s": lambda: judge(deadline_s=-1),
    "^api_key_env": lambda: judge(api_key_env="NO_SUCH_KEY"),
    "^MeanCorrectnessFilter.max: .* 0.2": lambda: MeanCorrectnessFilter(0.8, 0.2),
    "^MeanCorrectnessFilter.max: .* 1.1": lambda: MeanCorrectnessFilter(0.5, 1.1),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals_name_the_option_or_the_sample(message: str):
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()
