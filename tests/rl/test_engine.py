"""Rollouts of other engines: records from tokens and steps, what is refused, equal training."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lit_dlm.decoding.api import WorkQueue
from lit_dlm.rl.engine import RolloutPrompt
from lit_dlm.rl.rollout import SAMPLED, DecodingEngine, OnlineRollouts
from lit_dlm.rl.settings import RolloutSettings
from lit_dlm.tasks import PromptExample
from lit_dlm.toy.word_problems import WordProblems
from lit_dlm.training.ranks import Ranks
from lit_dlm.trajectories.members import encode_members
from lit_dlm.trajectories.record import Trajectory
from tests.finetuning.runs import trained
from tests.processes import in_processes
from tests.rollouts import EOS, MASK, PAD, G, fit, last_records, learner, policy, rollout_data

EXAMPLE = PromptExample(uid="task/train/0", task="task", text="?")
PROMPT = RolloutPrompt(
    example=EXAMPLE, prompt_ids=[5, 6], uid="task/train/0@a", meta={"a": 1}, response_length=4
)


def test_a_response_given_by_tokens_and_steps_becomes_a_record() -> None:
    """Steps 3, 1, 1 are 2, 0, 0 from the first; the text ends before the fourth cell."""
    record = PROMPT.record(policy(), [7, 8, EOS], [3, 1, 1], [-0.5, None, -1.5])
    assert (record.tokens.tolist(), record.commit_step.tolist()) == (
        [7, 8, EOS, MASK],
        [2, 0, 0, -1],
    )
    assert (record.num_steps, record.status, record.meta) == (3, "eos", {"a": 1})
    np.testing.assert_array_equal(record.signals[SAMPLED], np.float32([-0.5, np.nan, -1.5, np.nan]))
    whole = PROMPT.record(policy(), [7, MASK, 8, 9], [0, None, 0, 2])
    assert (whole.commit_step.tolist(), whole.status) == ([0, -1, 0, 2], "complete")
    assert np.isnan(whole.signals[SAMPLED]).all()


@pytest.mark.parametrize(
    ("tokens", "steps", "message"),
    [
        ([7, 8, 9, 10], [0, 1, 2], "expected 4 steps, one a token, got 3"),
        ([7, 8, 9, 10, EOS], [0, 1, 2, 3, 4], "expected 4 tokens, or fewer with an end .* got 5"),
        ([7, 8, 9], [0, 1, 2], "or fewer with an end of text among them, got 3"),
        ([7, 8, 9, 24], [0, 1, 2, 3], r"tokens must be in 0\.\.23 .* got 24"),
        ([7, 8, 9, MASK], [0, 1, 2, 3], "a position ends as a mask"),
        ([7, 8, 9, 10], [0, 1, 2, None], "a position with no commit step"),
        ([7, 8, 9, 10], [0, 1, 2, 70_000], "up to 65535"),
    ],
)
def test_a_response_that_cannot_be_trained_on_is_named(
    tokens: list[int], steps: list[int | None], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"task/train/0@a.*{message}"):
        PROMPT.record(policy(), tokens, steps)


class Elsewhere:
    """Decodes as the loop does; without a base class, backwards, and then ``spoilt``."""

    def __init__(self, spoilt: Callable[[list[Trajectory]], list[Trajectory]] = list) -> None:
        self.spoilt = spoilt

    def records(self, prompts: Sequence[RolloutPrompt], module: Any) -> list[Trajectory]:
        loop = DecodingEngine(module, method="random", response_length=G, batch_size=2)
        by_uid = {prompt.uid: prompt for prompt in prompts}
        found = [
            by_uid[one.uid].record(
                module.backbone,
                one.tokens.tolist(),
                one.commit_step.tolist(),
                one.signals[SAMPLED].tolist(),
            )
            for one in loop.records(prompts, WorkQueue(len(prompts)))
        ]
        return self.spoilt(found[::-1])


@pytest.mark.slow
def test_an_engine_that_decodes_as_the_loop_trains_as_the_loop(tmp_path: Path) -> None:
    """Two RL steps, to the bit: tokens, mismatch and weights."""
    ours, theirs = learner(), learner()
    fit(ours, rollout_data(), tmp_path)
    fit(theirs, rollout_data(engine=Elsewhere()), tmp_path)
    for one, other in zip(last_records(ours), last_records(theirs), strict=True):
        assert one.uid == other.uid
        assert other.meta == {**one.meta, "engine": "Elsewhere"}
        assert one.tokens.tolist() == other.tokens.tolist()
    metrics = [rl.loop.current.metrics for rl in (ours, theirs)]
    assert metrics[0]["rollout/mismatch"] == metrics[1]["rollout/mismatch"] < 1e-6
    weights = trained(theirs)
    assert all(weight.equal(weights[name]) for name, weight in trained(ours).items())


def test_what_generate_records_is_taken_as_it_is() -> None:
    """By the engine that the page shows."""
    page = Path(__file__).parents[2] / "docs" / "how-to" / "own_engine.md"
    found: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)[0], found)
    rl = learner().eval()
    source = OnlineRollouts(rl, ["random"], rollout_data(engine=found["DraftEngine"]()))
    records = [one.record for one in source.collect(0, 0, version=0, ranks=Ranks()).scored]
    source.close()
    assert {one.meta["engine"] for one in records} == {"DraftEngine"}
    assert not any(MASK in one.tokens for one in records)
    assert len({one.prompt_ids.tobytes() for one in records}) > 1


def cut(record: Trajectory) -> Trajectory:
    parts = {"tokens": record.tokens[1:], "commit_step": record.commit_step[1:]}
    return replace(record, **parts, signals={})


def _collected(rank: int, world_size: int) -> list[bytes]:
    if world_size > 1:
        dist.init_process_group("gloo")
    rl = learner().eval()
    source = OnlineRollouts(rl, ["random"], rollout_data(engine=Elsewhere()))
    with torch.no_grad():
        found = source.collect(0, 0, version=0, ranks=Ranks(rank, world_size))
    source.close()
    return [encode_members([one.to_record()])[0] for one in found.scored]


@pytest.mark.ddp
def test_each_process_asks_for_its_share_and_gets_all() -> None:
    expected = _collected(0, 1)
    assert in_processes(2, _collected, 2) == [expected, expected]


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        (lambda found: found[1:], "a record for each of 2 prompts, got none for word_problems/"),
        (
            lambda found: [*found, PROMPT.record(policy(), [7] * 4, [0] * 4)],
            "got task/train/0@a, which was not asked for",
        ),
        (
            lambda found: [cut(one) for one in found],
            "expected 8 tokens, or fewer with an end of text among them, got 7",
        ),
    ],
)
def test_records_that_were_not_asked_for_are_refused(
    tmp_path: Path, spoilt: Any, message: str
) -> None:
    data = rollout_data(engine=Elsewhere(spoilt), prompts_per_step=1, responses_per_prompt=2)
    with pytest.raises(ValueError, match=rf"^(engine Elsewhere|word_problems).*: .*{message}"):
        fit(learner(), data, tmp_path, steps=1)


def test_an_engine_needs_its_method_and_the_source_online() -> None:
    tasks: Any = [WordProblems("train", num_examples=2)]
    with pytest.raises(ValueError, match=r"^engine: object has no method 'records'"):
        RolloutSettings(tasks, rewards=[], engine=object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^engine: rolls out only with source 'online'"):
        RolloutSettings(tasks, rewards=[], engine=Elsewhere(), source="shards", shards="a")  # type: ignore[arg-type]


def test_padding_is_a_token_of_a_response() -> None:
    """Engines that fill a canvas after its end of text give the whole of it."""
    record = PROMPT.record(policy(), [7, EOS, PAD, PAD], [1, 1, 2, 2])
    assert (record.commit_step.tolist(), record.num_steps) == ([0, 0, 1, 1], 2)
