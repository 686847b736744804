"""Rollouts: names, noise, what the sampler said, scores in the record, and what is told."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lit_dlm.datamodules.rollouts import RolloutProgress
from lit_dlm.decoding import (
    Decoder,
    DecodeSettings,
    EntropyPolicy,
    FixedQuota,
    NoQuota,
    Sampler,
    ThresholdPolicy,
)
from lit_dlm.grading import Verdict
from lit_dlm.rewards import GroupFilter, Reward, RewardScore, Rollout
from lit_dlm.rl.advantages import RawReward
from lit_dlm.rl.rollout import (
    SAMPLED,
    DecodingEngine,
    OnlineRollouts,
    ScoredRollout,
    groups_of,
    in_order,
    rollout_prompts,
    scores_of,
)
from lit_dlm.tasks import PromptExample
from lit_dlm.training.ranks import Ranks
from lit_dlm.training.sharding import shard_trained
from lit_dlm.trajectories.members import encode_members
from tests.processes import in_processes
from tests.rollouts import EOS, G, learner, rollout_data


def engine(
    *, batch_size: int = 4, temperature: float = 1.0, score_on: Any = "filtered"
) -> DecodingEngine:
    rl = learner().eval()
    rl.decoders["warm"] = Decoder(
        policy=EntropyPolicy(),
        quota=FixedQuota(3),
        sampler=Sampler(temperature=temperature, top_k=5, score_on=score_on),
        settings=DecodeSettings(eos_rule="fill"),
    )
    return DecodingEngine(rl, method="warm", response_length=G, batch_size=batch_size)


def responses(using: DecodingEngine, step: int = 0) -> list[Rollout]:
    """Three to each of two prompts."""
    problems = [
        (PromptExample(uid=f"task/train/{number}", task="task", text="?"), ids)
        for number, ids in enumerate(([10, 11, 12], [13, 14]))
    ]
    return using.generate(
        rollout_prompts(problems, method="warm", step=step, num_responses=3, response_length=G)
    )


def test_a_response_belongs_to_its_name_and_not_to_its_batch() -> None:
    """Those that almost fill their budget can count as overlong: dLLM-RL takes five cells off, and
    with a margin of 3, five tokens of eight are too many."""
    strict = engine(batch_size=4)
    strict.overlong_margin = 3
    first, second = responses(engine(batch_size=6)), responses(strict)
    tokens = [rollout.trajectory.tokens.tolist() for rollout in first]
    assert tokens == [rollout.trajectory.tokens.tolist() for rollout in second]
    assert len({tuple(row) for row in tokens}) == 6
    other = responses(strict, step=1)
    assert tokens != [rollout.trajectory.tokens.tolist() for rollout in other]
    assert first[4].trajectory.uid == "task/train/1@warm/000000.0001.001"
    assert first[4].trajectory.prompt_ids.tolist() == [13, 14]
    lengths = [rollout.trajectory.meta["num_tokens"] for rollout in first]
    assert [rollout.is_overlong for rollout in first] == [length >= 8 for length in lengths]
    assert [rollout.is_overlong for rollout in second] == [length >= 4 for length in lengths]


def test_masks_of_an_unfinished_response_are_no_tokens_but_fill_its_budget() -> None:
    """One step writes three cells of eight."""
    using = engine()
    using.module.decoders["warm"].settings = DecodeSettings(max_steps=1)
    for rollout in responses(using):
        lengths = rollout.trajectory.meta["num_tokens"], rollout.num_tokens
        assert (*lengths, rollout.is_overlong) == (3, G, True)


@pytest.mark.parametrize("score_on", ["filtered", "raw"])
def test_the_samplers_probabilities_are_those_of_its_draws(score_on: str) -> None:
    """Temperature 0.5 and top-k 5, recomputed from the state of every step, whatever is scored."""
    using = engine(temperature=0.5, score_on=score_on)
    for rollout in responses(using):
        record = rollout.trajectory
        found = record.signals[SAMPLED]
        assert rollout.is_overlong == (EOS not in record.tokens)
        assert record.meta["num_tokens"] == int(np.argmax(np.append(record.tokens, EOS) == EOS))
        assert rollout.num_tokens == min(record.meta["num_tokens"] + 1, G)
        assert rollout.decode(record.tokens[: rollout.num_tokens].tolist()) == rollout.text
        for step in range(record.num_steps):
            ids = torch.tensor([*record.prompt_ids.tolist(), *record.state_at(step).tolist()])[None]
            with torch.no_grad():
                logits = using.module.backbone.denoise(ids).logits[0, record.num_prompt :] / 0.5
            least = logits.topk(5, -1).values[:, -1:]
            log_probs = logits.masked_fill(logits < least, -torch.inf).log_softmax(-1)
            for cell in record.committed_at(step).tolist():
                if np.isfinite(found[cell]):
                    expected = float(log_probs[cell, record.tokens[cell]])
                    assert abs(found[cell] - expected) < 1e-5


def test_scores_are_fields_and_in_files_facts_of_the_record() -> None:
    paid: dict[str, Any] = {"token_rewards": np.ones(G, np.float32), "parts": {"a": 2.0}}
    right = RewardScore(total=0.5, **paid, verdict=Verdict(status="right"), is_correct=True)
    rollouts = [
        ScoredRollout.from_record(one.trajectory, **scores_of(one, right, kept=True, version=7))
        for one in responses(engine())
    ]
    first = rollouts[0]
    assert (first.reward, first.correct, first.parts) == (0.5, True, {"a": 2.0})
    meta = first.to_record().meta
    told = {"reward": 0.5, "correct": True, "policy_version": 7, "kept": True, "parts": {"a": 2.0}}
    told |= {"overlong": first.overlong, "garbled": first.garbled, "token_rewards": [1.0] * G}
    assert meta == {**first.record.meta, **told}
    again = ScoredRollout.from_record(first.to_record())
    assert again == replace(first, record=again.record)
    assert groups_of(rollouts) == [[0, 1, 2], [3, 4, 5]]
    assert in_order(rollouts[at] for at in (3, 0, 5, 1, 4, 2)) == rollouts


def test_what_nothing_graded_is_neither_right_nor_wrong() -> None:
    (one, *_) = responses(engine())
    for verdict in (None, Verdict(status="ungraded")):
        score = RewardScore(total=0.5, verdict=verdict)
        found = ScoredRollout.from_record(
            one.trajectory, **scores_of(one, score, kept=True, version=7)
        )
        assert found.correct is None
        assert "token_rewards" not in found.to_record().meta


class Alike(Reward):
    """How many responses of a group begin as oddly: looks at the group as a whole."""

    name = "alike"

    def score(self, group: Sequence[Rollout]) -> list[RewardScore]:
        odd = [int(rollout.trajectory.tokens[0]) % 2 for rollout in group]
        return [RewardScore(total=odd.count(one) / 7) for one in odd]


class DropMixed(GroupFilter):
    """Drops groups that begin both ways."""

    def keep(self, scores: Sequence[RewardScore]) -> bool:
        return min(score.total for score in scores) == 3 / 7


def _collected(rank: int, world_size: int, slots: int) -> tuple[list[bytes], set[int], set[bool]]:
    """Two RL steps; the responses of a prompt are on several processes."""
    if world_size > 1:
        dist.init_process_group("gloo")
    settings = rollout_data(
        rewards=[Alike()], filters=[DropMixed()], prompts_per_step=5, rollout_batch_size=slots
    )
    uneven = Decoder(
        policy=ThresholdPolicy(0.4),
        quota=NoQuota(),
        sampler=Sampler(temperature=1.0, top_k=3, score_on="filtered"),
    )
    rl = learner(decoders={"uneven": uneven}).eval()
    source = OnlineRollouts(rl, ["uneven"], settings)
    ranks = Ranks(rank, world_size)
    found, steps, kept = [], set(), set()
    for step in range(2):
        if rank:
            time.sleep(0.05)  # the others take more then
        report = Mock()
        rollouts = source.collect(step, 5 * step, version=7, ranks=ranks, report=report)
        told, share = [call.args for call in report.call_args_list], -(-15 // world_size)
        assert told or world_size > 1  # others may have taken all
        assert all(name == "rollout" and done <= total == share for name, done, total in told)
        assert rollouts.num_prompts == 5
        found += [encode_members([one.to_record()])[0] for one in rollouts.scored]
        steps |= {one.record.num_steps for one in rollouts.scored}
        kept |= {one.kept for one in rollouts.scored}
        assert 0.0 <= rollouts.times["occupancy"] <= 1.0
        assert {"rollout", "wait", "reward"} < rollouts.times.keys()
    source.close()
    return found, steps, kept


@pytest.mark.slow
def test_records_do_not_depend_on_slots_or_processes() -> None:
    """Every byte of the records of two RL steps, scores included."""
    expected = _, steps, kept = _collected(0, 1, 1)
    assert len(steps) > 2  # rows do not end together
    assert kept == {True, False}
    assert _collected(0, 1, 64) == expected
    for count in (2, 3):
        for found in in_processes(count, _collected, count, 4):
            assert found == expected


def _one_response(rank: int, world_size: int) -> tuple[bytes, bool, list[float]]:
    """A response, whether this process decoded it, and a forward that needs all processes."""
    rl = learner().eval()
    if world_size > 1:
        dist.init_process_group("gloo")
        shard_trained(rl, dist.init_device_mesh("cpu", (world_size,)))
    settings = rollout_data(prompts_per_step=1, responses_per_prompt=1, advantage=RawReward())
    source = OnlineRollouts(rl, ["random"], settings)
    with rl.rollout_weights():
        rollouts = source.collect(0, 0, version=0, ranks=Ranks(rank, world_size))
    source.close()
    with torch.no_grad():
        logits = rl.backbone(torch.arange(8, 14)[None])[0, :, 8:12]
    is_busy = bool(rollouts.times["occupancy"])
    block = encode_members([one.to_record() for one in rollouts.scored])[0]
    return block, is_busy, logits.flatten().tolist()


@pytest.mark.ddp
def test_a_process_without_rows_waits_for_the_others_under_fsdp() -> None:
    block, _, logits = _one_response(0, 1)
    found = in_processes(2, _one_response, 2)
    assert sorted(decoded for _, decoded, _ in found) == [False, True]
    for one, _, others in found:
        assert one == block
        np.testing.assert_allclose(others, logits, rtol=1e-9)


def test_time_left_follows_from_the_rate(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """30 s for a quarter leave 90 s, which the first process logs at intervals."""
    clock = [100.0]
    monkeypatch.setattr("lit_dlm.datamodules.rollouts.time.monotonic", lambda: clock[0])

    def told(*callbacks: Any, done: int, first: bool = True) -> None:
        trainer: Any = SimpleNamespace(is_global_zero=first, callbacks=[object(), *callbacks])
        progress = RolloutProgress(trainer, 3)
        for number in range(1, done + 1):
            clock[0] += 30.0 if number == 1 else 1.0
            progress("rollout", number, 4)

    taker = Mock()
    caplog.set_level(logging.INFO)
    told(taker, done=2)
    told(done=1, first=False)
    assert taker.on_rollout_progress.call_count == 2
    assert caplog.messages == ["RL step 3: rollout 1/4, 1:30 left"]
