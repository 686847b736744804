"""Means of validation by hand, and their independence of where the responses lie."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_dlm.grading import Verdict
from lit_dlm.rewards import RewardScore
from lit_dlm.rl.metrics import Quotient, RolloutValidation, ValueFit, rollout_metrics
from lit_dlm.tasks import PromptExample
from tests.rollouts import decoded, policy, scored

REWARDS = {0: (1.0, 0.0, 0.5), 1: (1.0, 1.0, 1.0), 2: (0.0, 0.0, 0.0)}
"""By prompt, of its three responses."""


def engine(*taken: tuple[int, int]) -> Any:
    """Decodes nothing, of the responses that it takes."""

    def generate(prompts: Any, *, shared: bool) -> list[Any]:
        assert shared
        metas = [{**one.meta, "num_tokens": 4} for one in prompts]
        mine = [meta for meta in metas if (meta["prompt"], meta["response"]) in taken]
        records = [SimpleNamespace(meta=meta, num_steps=2) for meta in mine]
        return [SimpleNamespace(trajectory=record) for record in records]

    return SimpleNamespace(generate=generate, response_length=4)


def score(groups: Any) -> list[list[RewardScore]]:
    """Reads rewards off; half a point or more is right, prompt 2 is not graded."""
    found = []
    for (rollout,) in groups:
        meta = rollout.trajectory.meta
        reward = REWARDS[meta["prompt"]][meta["response"]]
        is_right = reward >= 0.5
        status = "ungraded" if meta["prompt"] == 2 else "right" if is_right else "wrong"
        verdict = Verdict(status=status)  # type: ignore[arg-type]
        found.append([RewardScore(total=reward, verdict=verdict, is_correct=is_right)])
    return found


class Together:
    """Adds up over processes that run one after the other; gives sums when asked again."""

    device = torch.device("cpu")
    total: Tensor | float = 0.0

    def sum(self, values: Tensor) -> Tensor:
        self.total = self.total + values
        return self.total


ALL = [(prompt, response) for prompt in REWARDS for response in range(3)]
PROBLEMS = [(PromptExample(uid=str(number), task="t", text=""), [3]) for number in range(4)]


def scores(*processes: list[tuple[int, int]]) -> dict[str, float]:
    """Of responses that processes have taken; decoder ``b`` is not asked."""
    together: Any = Together()
    rewarder: Any = SimpleNamespace(score=score)
    for mine in processes:
        engines = {"a": engine(*mine), "b": engine()}
        validation = RolloutValidation(engines, rewarder, PROBLEMS, num_responses=3)
        validation.add("a")
        found = validation.result(together)
    return found


def test_responses_to_one_prompt_are_averaged_first() -> None:
    """Prompts are worth 0.5, 1 and 0: deviation 0.5 (of 3 - 1), so a standard error of 0.5/3^0.5.

    Of prompt 0 two of three are right, of prompt 1 all: 5/6. Decoder ``b`` and prompt 3 have none.
    Where responses lie makes no difference.
    """
    expected = {
        "reward": 0.5,
        "reward_stderr": 0.5 / 3**0.5,
        "response_length": 4.0,
        "num_steps": 2.0,
        "num_prompts": 3.0,
        "accuracy": 5 / 6,
    }
    assert scores(ALL) == pytest.approx(expected)
    assert scores(ALL[::2], ALL[1::2]) == pytest.approx(expected)
    assert "reward_stderr" not in scores(ALL[:3])  # of one prompt


def test_plain_scores_may_be_means_over_decoders() -> None:
    """Decoder ``a`` has the responses 0 and 1 (rewards 1, 0; 1, 1; 0, 0), ``b`` response 2.

    Prompts are worth 0.5, 1 and 0 in all three responses, 0.5, 1, 0 in ``a`` and 0.5, 1, 0 in
    ``b``. Of prompt 0 two of three are right, one of two in ``a``, the only one in ``b``.
    """
    first = [(prompt, response) for prompt in REWARDS for response in (0, 1)]
    engines = {"a": engine(*first), "b": engine(*((prompt, 2) for prompt in REWARDS))}
    rewarder: Any = SimpleNamespace(score=score, grades=True)
    validation = RolloutValidation(engines, rewarder, PROBLEMS, num_responses=3, is_mean=True)
    validation.add("a")
    validation.add("b")
    found = validation.result(Together())  # type: ignore[arg-type]
    assert [found[f"{of}reward"] for of in ("", "a/", "b/")] == [0.5, 0.5, 0.5]
    assert [found[f"{of}accuracy"] for of in ("", "a/", "b/")] == pytest.approx([5 / 6, 3 / 4, 1])
    assert set(validation.names) >= found.keys()


def test_facts_by_hand() -> None:
    """Rewards 0, 1 in each of three groups: mean and deviation 1/2."""
    rollouts = scored(decoded(policy(), 6))
    metrics = rollout_metrics(rollouts)
    assert metrics["rollout/reward"] == metrics["rollout/reward_std"] == 0.5
    assert metrics["rollout/groups"] == metrics["rollout/kept_groups"] == 3.0
    steps = sum(one.record.num_steps for one in rollouts)
    tokens = sum(one.record.num_committed for one in rollouts)
    assert metrics["rollout/tokens_per_step"] == tokens / steps
    grades = (True, False, None)  # None: no grader knew
    rollouts = [
        replace(
            one,
            parts={"digits": float(number)},
            overlong=number < 3,
            kept=number < 2,
            correct=grades[number % 3],
        )
        for number, one in enumerate(rollouts)
    ]
    metrics = rollout_metrics(rollouts)
    names = ("reward/digits", "overlong", "kept_groups")
    assert [metrics[f"rollout/{name}"] for name in names] == [2.5, 0.5, 1.0]
    assert metrics["rollout/correct"] == 0.5


VALUES = torch.tensor([1.0, 0.0, 2.0, 9.0])
RETURNS = torch.tensor([1.0, -1.0, 3.0, -9.0])
COUNTED = torch.tensor([True, True, True, False])


@pytest.mark.parametrize("sizes", [[4], [1, 1, 1, 1], [3, 1]])
def test_scores_do_not_depend_on_batches(sizes: list[int]) -> None:
    """Errors 0, 1, -1; the returns 1, -1, 3 have mean 1 and variance 8/3."""
    error, explained = ValueFit("error"), ValueFit("explained")
    parts = zip(*(rows.split(sizes) for rows in (VALUES, RETURNS, COUNTED)), strict=True)
    for values, returns, counted in parts:
        error.update(values, returns, counted)
        explained.update(values, returns, counted)
    assert float(error.compute()) == pytest.approx(math.sqrt(2 / 3))
    assert float(explained.compute()) == pytest.approx(1 - (2 / 3) / (8 / 3))


def test_nothing_is_explained_where_returns_do_not_vary() -> None:
    explained = ValueFit("explained")
    explained.update(VALUES, torch.ones(4), COUNTED)
    assert explained.compute() == 0.0


def test_sums_stay_exact_in_a_model_of_bfloat16() -> None:
    """1000 and 1001 are one number in bfloat16."""
    quotient = Quotient().to(torch.bfloat16)
    for _ in range(1001):
        quotient.update(torch.tensor(1.0), 1.0)
    quotient.update(torch.tensor(1.0), 0.0)
    torch.testing.assert_close(quotient.compute(), torch.tensor(1002 / 1001))
    quotient.reset()
    quotient.update(torch.tensor(0.0), 0.0)
    assert quotient.compute() == 0.0
