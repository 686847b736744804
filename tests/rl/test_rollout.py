"""The rollout engine: names, noise, what the sampler said, and scores in the record."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lit_dlm.decoding import Decoder, DecodeSettings, EntropyPolicy, FixedQuota, Sampler
from lit_dlm.grading import Verdict
from lit_dlm.rewards import RewardScore
from lit_dlm.rl.rollout import (
    SAMPLED,
    RolloutEngine,
    groups_of,
    in_order,
    rollout_prompts,
    with_score,
)
from lit_dlm.tasks import PromptExample
from tests.rollouts import EOS, G, learner, module, policy


def engine(
    *, batch_size: int = 4, temperature: float = 1.0, score_on: Any = "filtered"
) -> RolloutEngine:
    rl = learner().eval()
    rl.decoders["warm"] = Decoder(
        policy=EntropyPolicy(),
        quota=FixedQuota(3),
        sampler=Sampler(temperature=temperature, top_k=5, score_on=score_on),
        settings=DecodeSettings(eos_rule="fill"),
    )
    return RolloutEngine(rl, method="warm", response_length=G, batch_size=batch_size)


def prompts(step: int = 0) -> list:
    found = []
    for place, ids in enumerate(([10, 11, 12], [13, 14])):
        example = PromptExample(uid=f"task/train/{place}", task="task", text="?")
        found += rollout_prompts(
            example, ids, method="warm", step=step, place=place, num_responses=3
        )
    return found


def test_a_response_belongs_to_its_name_and_not_to_its_batch() -> None:
    told: list[int] = []
    first = engine(batch_size=6).generate(prompts(), report=told.append)
    second = engine(batch_size=4).generate(prompts())
    other = engine(batch_size=6).generate(prompts(step=1))
    assert told == [6]
    tokens = [rollout.trajectory.tokens.tolist() for rollout in first]
    assert tokens == [rollout.trajectory.tokens.tolist() for rollout in second]
    assert len({tuple(row) for row in tokens}) == 6
    assert tokens != [rollout.trajectory.tokens.tolist() for rollout in other]
    assert first[4].trajectory.uid == "task/train/1@warm/000000.0001.001"
    assert first[4].trajectory.prompt_ids.tolist() == [13, 14]


def test_responses_that_almost_fill_their_budget_can_count_as_overlong() -> None:
    """dLLM-RL takes five cells off: with a margin of 3, five tokens of eight are too many."""
    strict = engine()
    strict.overlong_margin = 3
    pairs = list(zip(engine().generate(prompts()), strict.generate(prompts()), strict=True))
    lengths = [one.trajectory.meta["num_tokens"] for one, _ in pairs]
    assert [one.is_overlong for one, _ in pairs] == [length >= 8 for length in lengths]
    assert [other.is_overlong for _, other in pairs] == [length >= 5 for length in lengths]
    with pytest.raises(ValueError, match="overlong_margin: expected 0 to 3"):
        RolloutEngine(
            module(policy()), method="random", response_length=4, batch_size=1, overlong_margin=4
        )


@pytest.mark.parametrize("score_on", ["filtered", "raw"])
def test_the_samplers_probabilities_are_those_of_its_draws(score_on: str) -> None:
    """Temperature 0.5 and top-k 5, recomputed from the state of every step, whatever is scored."""
    rollouts = engine(temperature=0.5, score_on=score_on)
    backbone = rollouts.module.backbone
    for rollout in rollouts.generate(prompts()):
        record = rollout.trajectory
        found = record.signals[SAMPLED]
        assert rollout.is_overlong == (EOS not in record.tokens)
        assert record.meta["num_tokens"] == int(np.argmax(np.append(record.tokens, EOS) == EOS))
        assert rollout.num_tokens == min(record.meta["num_tokens"] + 1, G)
        assert rollout.decode is not None
        assert rollout.decode(record.tokens[: rollout.num_tokens].tolist()) == rollout.text
        for step in range(record.num_steps):
            ids = torch.from_numpy(record.canvas(step).astype(np.int64))[None]
            with torch.no_grad():
                logits = backbone.denoise(ids).logits[0, record.num_prompt :] / 0.5
            least = logits.topk(5, -1).values[:, -1:]
            log_probs = logits.masked_fill(logits < least, -torch.inf).log_softmax(-1)
            for cell in record.committed_at(step).tolist():
                if np.isfinite(found[cell]):
                    expected = float(log_probs[cell, record.tokens[cell]])
                    assert abs(found[cell] - expected) < 1e-5


def test_scores_go_into_the_record_and_records_into_order() -> None:
    rollouts = engine().generate(prompts())
    score = RewardScore(
        total=0.5,
        token_rewards=np.ones(G, np.float32),
        parts={"a": 2.0},
        verdict=Verdict(status="right"),
        is_correct=True,
    )
    records = [with_score(r, score, kept=True, version=7) for r in rollouts]
    meta = records[0].meta
    assert (meta["reward"], meta["correct"], meta["policy_version"]) == (0.5, True, 7)
    assert meta["parts"] == {"a": 2.0}
    assert meta["token_rewards"] == [1.0] * G
    unknown = RewardScore(total=0.5, verdict=Verdict(status="ungraded"))
    for ungraded in (RewardScore(total=0.5), unknown):
        assert "correct" not in with_score(rollouts[0], ungraded, kept=True, version=7).meta
    shuffled = [records[at] for at in (3, 0, 5, 1, 4, 2)]
    assert [record.uid for record in in_order(shuffled)] == [record.uid for record in records]
    assert groups_of(records) == [[0, 1, 2], [3, 4, 5]]


def test_an_unknown_method_is_named() -> None:
    with pytest.raises(ValueError, match="method: expected one of random, got 'x'"):
        RolloutEngine(module(policy()), method="x", response_length=4, batch_size=1)
    with pytest.raises(ValueError, match="at least 1"):
        RolloutEngine(module(policy()), method="random", response_length=0, batch_size=1)
