"""Dealing, advantages and old log-probabilities of one RL step, and what a row counts in it."""

import zlib
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from lit_dlm.rewards import Reward, RewardScore, Rollout
from lit_dlm.rl.advantages import GroupZScore, RawReward
from lit_dlm.rl.rollout import Rollouts
from lit_dlm.rl.settings import PolicyObjective, ValueObjective
from lit_dlm.rl.step import (
    MicroBatch,
    RLProgress,
    RLStep,
    rl_step,
    score_batches,
    shard_samples,
)
from lit_dlm.training.masking import RandomMasking, TraceMasking
from lit_dlm.trajectories.record import Trajectory
from tests.rollouts import (
    FAMILIES,
    advantaged,
    answer_cells,
    decoded,
    direct_log_probs,
    every,
    fit,
    learner,
    module,
    policy,
    prepared,
    rollout_data,
    scored,
    token_table,
    with_old_scores,
)


def dealt(*counts: int, **options: Any) -> list[MicroBatch]:
    return shard_samples(*(np.ones(count) for count in counts), **options)


def one_update(batches: list[MicroBatch]) -> Counter[tuple[int, float]]:
    """Samples of an update with their share in its gradient, copies without weight left out."""
    return Counter(
        (item, round(factor, 6))
        for samples, factor in batches
        if factor
        for item in samples.tolist()
    )


@pytest.mark.parametrize(
    ("counts", "sizes"),
    [
        ((5,), (5,)),
        ((16,), (8, 8)),
        ((17,), (6, 6, 5)),  # never a step from a single row
        ((21,), (7, 7, 7)),
        ((9, 3, 7), (5, 4, 3, 7)),  # no update mixes passes
    ],
)
def test_updates_are_even_shares_of_all_items_on_any_number_of_processes(
    counts: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    """At most eight samples an update; those of smaller ones weigh more."""
    alone = dealt(*counts, batch_size=2, accumulate=4, seed=(1,))
    options: dict[str, Any] = {"batch_size": 2, "accumulate": 2, "world_size": 2, "seed": (1,)}
    pair = [dealt(*counts, rank=rank, **options) for rank in range(2)]
    # Only the last update may have fewer batches.
    assert len(alone) == 4 * len(sizes) - 4 - (-sizes[-1] // 2)
    assert [len(batches) for batches in pair] == [2 * len(sizes) - 2 - (-sizes[-1] // 4)] * 2
    seen: list[int] = []
    for step, size in enumerate(sizes):
        both = [batch for batches in pair for batch in batches[2 * step : 2 * step + 2]]
        assert all(1 <= len(samples) <= 2 for samples, _ in both)
        update = one_update(both)
        assert update == one_update(alone[4 * step : 4 * step + 4])
        assert [*update.values()] == [1] * size
        assert {factor for _, factor in update} == {round(8 / size, 6)}
        seen += [item for item, _ in update]
    for begin, end in pairwise([0, *np.cumsum(counts)]):
        assert sorted(seen[begin:end]) == list(range(begin, end))


def test_items_weigh_by_their_rows_and_copies_nothing() -> None:
    """Samples of 4, 1 and 1 rows, three a batch: the sum over six rows is divided by three slots.
    Of one sample for two processes one gets a copy."""
    ((samples, factor),) = shard_samples(np.array([4.0, 1.0, 1.0]), batch_size=3)
    assert (sorted(samples.tolist()), factor) == ([0, 1, 2], 0.5)
    for rank, expected in ((0, 8.0), (1, 0.0)):
        ((samples, factor),) = dealt(1, batch_size=4, rank=rank, world_size=2)
        assert (samples.tolist(), factor) == ([0], expected)


def test_two_batches_of_a_sample_keep_their_own_scores() -> None:
    """Batches of other samples may differ in rounding; the ratio begins at 1 in each of them."""
    backbone = policy().float().eval()
    rl, records = module(backbone), decoded(backbone, 6)
    samples = rl.rows.samples(records)
    batches = [MicroBatch(torch.arange(5), 1.0), MicroBatch(torch.tensor([0]), 0.0)]
    found, (_, _, count) = score_batches(rl, batches, samples)
    for (numbers, _), old in zip(batches, found, strict=True):
        assert rl.score(samples.select(numbers)).log_prob.equal(old.old_log_prob)
    # The copy is compared with nothing.
    assert count == samples.select(torch.arange(5)).tokens.sampled.isfinite().sum()


def test_advantages_without_values_are_those_of_the_response() -> None:
    """Rewards 0 and 1 in each group of two: -1 and 1."""
    rl, records = module(policy()), decoded(policy(), 6)
    samples, found = advantaged(rl, records, advantage=GroupZScore(), batch_size=4)
    rollouts = scored(records)
    assert found.values is None
    noted = [one.record for one in found.with_signals([*rollouts, rollouts[0]])]
    assert np.isnan(noted[-1].signals["commit_advantage"]).all()
    assert "commit_value" not in noted[0].signals
    table = token_table(samples, "advantage")
    for row, record in enumerate(records):
        cells = answer_cells(record)
        assert noted[row].signals["commit_advantage"][cells].tolist() == table[row, cells].tolist()
        assert {*table[row, cells].tolist()} == {2.0 * (row % 2) - 1.0}


def test_token_rewards_flow_back_along_the_steps() -> None:
    """Without values a token gets what its own and later steps are paid, means within steps."""
    rl, (first, second) = module(policy()), decoded(policy(), 2)
    cells = answer_cells(first)
    late = max(cells, key=lambda cell: first.commit_step[cell])
    records = [first.with_meta(token_rewards=[2.0 * (cell == late) for cell in range(8)]), second]
    samples, _ = advantaged(rl, records, advantage=RawReward(), batch_size=4)
    table = token_table(samples, "advantage")
    last = [c for c in cells if first.commit_step[c] == first.commit_step[late]]
    earlier = [cell for cell in cells if cell not in last]
    assert table[0, late] == 2.0
    assert table[0, earlier].tolist() == pytest.approx([2.0 / len(last)] * len(earlier))
    assert table[1, answer_cells(second)].unique().tolist() == [1.0]


@pytest.mark.parametrize("name", ["dream", "block from the sequence"])
@pytest.mark.parametrize("kind", ["lora", "full", "head"])
def test_values_are_read_at_the_states_of_the_decode(name: str, kind: Any) -> None:
    """Whatever is trained on, here random masks: g = l = 1 gives A = R - V of the trace's state."""
    backbone = policy(**FAMILIES[name]).eval()
    own = policy(**FAMILIES[name], initializer_range=0.2).eval() if kind == "full" else None
    value = ValueObjective(backbone=kind)
    rl = module(backbone, masking=RandomMasking(min_t=0.5), value=value, value_backbone=own)
    rl.double().eval()
    with torch.no_grad():
        rl.value_head.weight.normal_()
        for key, parameter in backbone.named_parameters():
            if ".lora_B.value." in key:
                parameter.normal_(std=0.3)
    records = decoded(backbone, 4)
    samples, found = advantaged(rl, records, advantage=RawReward(), batch_size=3)
    reader, tokens = own or backbone, samples.tokens
    at = tokens.response.tolist(), tokens.position.tolist()
    for row, cell, advantage, returns in zip(*at, tokens.advantage, tokens.returns, strict=True):
        record = records[row]
        assert returns == record.meta["reward"]
        before = record.state_at(int(record.commit_step[cell])).tolist()
        ids = torch.tensor([*record.prompt_ids.tolist(), *before])[None]
        start = record.num_prompt
        with torch.no_grad(), backbone.using_adapter("value" if kind == "lora" else "default"):
            hidden = reader.denoise(ids, hidden_layers=(-1,), response_start=start).hidden
            expected = float(rl.value_head(hidden[0, start + cell]))
        assert abs(float(advantage) - (record.meta["reward"] - expected)) < 1e-5
    stored = []
    noted = [one.record for one in found.with_signals(scored(records))]
    for record, row in zip(noted, found.members, strict=True):
        values, advantages = (record.signals[f"commit_{n}"] for n in ("value", "advantage"))
        cells = row[: record.num_generated].numpy()
        assert np.isnan(values[~cells]).all()
        wanted = record.meta["reward"] - values[cells].astype(np.float32)
        np.testing.assert_allclose(advantages[cells], wanted, atol=1e-2)
        stored.extend(values[cells].tolist())
    assert np.ptp(stored) > 0.1


@pytest.mark.parametrize("name", ["dream", "block from the response"])
def test_capped_rows_cap_the_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With g = l = 1 two rows a response have the advantages that they have among all rows."""
    backbone = policy(**FAMILIES[name]).eval()
    records = decoded(backbone, 6, per_step=1)
    tables, forwards = [], []
    for rows, given in ((None, {}), (2, {}), (2, {"gamma": 0.9})):
        masking = TraceMasking(padding="replayed", rows_per_sample=rows)
        value = ValueObjective(backbone="head", **given)
        rl = module(backbone, masking=masking, value=value)
        rl.double().eval()
        torch.nn.init.normal_(rl.value_head.weight, generator=torch.Generator().manual_seed(0))
        values = Mock(wraps=rl.values)
        monkeypatch.setattr(rl, "values", values)
        samples, found = advantaged(rl, records, advantage=RawReward(), batch_size=3)
        tables.append(token_table(samples, "advantage"))
        assert found.members.equal(~tables[-1].isnan()) or given
        num_valued = sum(len(call.args[0].states.response) for call in values.call_args_list)
        forwards.append((num_valued, len(samples)))
    known = ~tables[1].isnan()
    torch.testing.assert_close(tables[1][known], tables[0][known], rtol=0, atol=1e-6)
    assert known.sum() < (~tables[0].isnan()).sum()
    assert not torch.allclose(tables[2][known], tables[0][known])
    states, capped, discounted = forwards
    assert states[0] == states[1] == discounted[0]
    assert capped == (12, 12)


def test_the_initial_policy_is_the_one_without_the_adapter() -> None:
    backbone = policy().eval()
    records = decoded(backbone, 4)
    samples, _ = prepared(module(backbone, objective=PolicyObjective(kl_to="initial")), records)
    bare = policy(lora=False).eval()
    weights = {key.replace(".base_layer", ""): w for key, w in backbone.state_dict().items()}
    bare.load_state_dict({key: w for key, w in weights.items() if ".lora_" not in key})
    found = token_table(samples, "reference")
    for row, record in enumerate(records):
        cells = answer_cells(record)
        expected = direct_log_probs(bare, record)[cells]
        torch.testing.assert_close(found[row, cells], expected, rtol=1e-6, atol=1e-6)


def step_on(records: list[Trajectory], before: RLProgress, **options: Any) -> RLStep:
    """Of rollouts that are there already."""
    rl, report = module(policy()).eval(), options.pop("report", Mock())
    settings = rollout_data(batch_size=4, **options)
    found = Rollouts(scored(records), {"rollout": 1.0})
    source = Mock(**{"collect.return_value": found})
    return rl_step(rl, source, settings, before, report=report)


def test_an_rl_step_needs_no_trainer() -> None:
    """Rewards 0 and 1 in three groups, one dropped: -1 and 1 for the others, each state once."""
    records = decoded(policy(), 6)
    records[:2] = [record.with_meta(kept=False) for record in records[:2]]
    before, report = RLProgress(step=4, cursor=9, skipped=1, smoothed=1.0), Mock()
    step = step_on(records, before, report=report, passes=2)
    assert len(step.samples) == 2 * len(module(policy()).rows.samples(records[2:]))
    assert step.progress == RLProgress(step=5, cursor=12, skipped=1, smoothed=0.95)
    noted = [one.record for one in step.rollouts]
    assert [record.uid for record in noted] == [record.uid for record in records]
    dealt = [sample for samples, factor in step.batches if factor for sample in samples.tolist()]
    assert sorted(dealt) == every(step.samples).tolist()
    tokens = step.samples.tokens
    rewards = [records[2 + number].meta["reward"] for number in tokens.response.tolist()]
    pairs = set(zip(rewards, tokens.advantage.tolist(), strict=True))
    assert pairs == {(0.0, -1.0), (1.0, 1.0)}
    assert np.isnan(noted[0].signals["commit_advantage"]).all()
    assert step.metrics["rollout/items"] == len(step.samples)
    assert step.metrics["rollout/kept_groups"] == 2.0
    assert step.metrics["rollout/mismatch"] < 1e-6
    batch = step.batch(0)
    assert module(policy()).eval().score(batch).log_prob.equal(batch.tokens.old_log_prob)
    report.assert_called_with("old log-probabilities", len(step.batches), len(step.batches))


def test_an_rl_step_without_kept_groups_has_one_batch_without_weight() -> None:
    records = [record.with_meta(kept=False) for record in decoded(policy(), 6)]
    step = step_on(records, RLProgress(skipped=2), advantage=RawReward(), passes=2)
    assert step.progress == RLProgress(step=1, cursor=3, skipped=3, smoothed=0.5)
    assert step.metrics["rollout/skipped_steps"] == 3.0
    assert step.metrics["rollout/items"] == 0.0
    (batch,) = map(step.batch, range(len(step.batches)))
    assert batch.is_empty
    assert not batch.tokens.weight.any()


@pytest.mark.parametrize("found", [[0.0], [0.0, float("nan")]])
def test_an_advantage_that_is_no_number_per_response_is_refused(
    found: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One number too few, or one that is none."""
    monkeypatch.setattr(RawReward, "compute", lambda *_: torch.tensor(found))
    with pytest.raises(ValueError, match="advantage: RawReward must give 2 finite numbers"):
        step_on(decoded(policy(), 6), RLProgress(), advantage=RawReward())


class HashReward(Reward):
    """Arbitrary numbers, so that every response differs."""

    name = "hash"

    def score(self, group: Sequence[Rollout]) -> list[RewardScore]:
        return [RewardScore(total=zlib.crc32(r.text.encode()) % 100 / 100) for r in group]


def standing(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([{**group, "lr": 0.0} for group in params])


@pytest.mark.slow
def test_capped_rows_have_the_gradient_of_all_on_average() -> None:
    """Of the response with most samples, each pushing its tokens elsewhere, in one update: the mean
    over all six pairs of its four rows is the gradient without a cap."""
    records = [max(decoded(policy().eval(), 12), key=lambda record: len(answer_cells(record)))]

    def gradients(rows_per_sample: int | None, seeds: range) -> dict[Any, torch.Tensor]:
        masking = TraceMasking(padding="replayed", rows_per_sample=rows_per_sample)
        rl, found = module(policy(), masking=masking).eval(), {}
        for rl.rows.seed in seeds:
            samples = rl.rows.samples(records)
            rows = frozenset(tuple(row) for row in samples.states.supervised.tolist())
            if rows in found:
                continue
            samples = samples.with_tokens(advantage=samples.tokens.position.float() - 2.5)
            (share,) = shard_samples(samples.size.numpy(), batch_size=50)
            samples, _ = with_old_scores(rl, [share], samples)
            rl.zero_grad()
            batch = samples.select(share.samples, factor=share.factor, num_slots=50)
            rl.training_step(batch).backward()
            trained = [p.grad.flatten() for p in rl.parameters() if p.grad is not None]
            found[rows] = torch.cat(trained)
        return found

    ((rows, whole),) = gradients(None, range(1)).items()
    assert len(rows) == 4
    pairs = gradients(2, range(60))
    assert len(pairs) == 6
    mean = torch.stack(list(pairs.values())).mean(0)
    torch.testing.assert_close(mean, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.slow  # a whole RL step in each of four ways
def test_what_is_logged_does_not_depend_on_how_rows_are_dealt(tmp_path: Path) -> None:
    """The weights stand still, so that one update and several see the same."""
    found = []
    options: dict[str, Any] = {"rewards": [HashReward()], "prompts_per_step": 2}
    for batch_size, accumulate in ((96, 1), (8, 64), (1, 1000), (8, 1)):
        rl = learner(value=ValueObjective(backbone="head", lr=0.0), optimizer=standing)
        torch.nn.init.normal_(rl.value_head.weight, std=0.1)
        data = rollout_data(batch_size=batch_size, advantage=RawReward(), **options)
        trainer = fit(rl, data, tmp_path, steps=1, accumulate_grad_batches=accumulate)
        found.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    names = ("loss", "policy_loss", "value_loss", "value_error", "value_explained", "entropy")
    first, *others, several = ([scores[f"train/{name}"] for name in names] for scores in found)
    assert min(map(abs, first)) > 1e-2
    assert all(other == pytest.approx(first, rel=1e-5) for other in others)
    # Updates of different size count alike in the mean over updates, tokens always do.
    assert several[3:5] == pytest.approx(first[3:5], rel=1e-5)
