"""Dealing, advantages and old log-probabilities of one RL step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lit_dlm.losses.corruption import RandomMasking, TraceMasking
from lit_dlm.rl.advantages import GroupZScore, RawReward
from lit_dlm.rl.items import RolloutBatch
from lit_dlm.rl.rollout import Rollouts
from lit_dlm.rl.settings import PolicyObjective, ValueObjective
from lit_dlm.rl.step import (
    MicroBatch,
    RLProgress,
    RLStep,
    fill_advantages,
    fill_old_scores,
    rl_step,
    shard_items,
)
from lit_dlm.trajectories.record import Trajectory
from tests.rollouts import (
    FAMILIES,
    answer_cells,
    decoded,
    direct_log_probs,
    every,
    module,
    policy,
    prepared,
    rollout_data,
    unit_table,
)


def dealt(*counts: int, **options: Any) -> list[MicroBatch]:
    return shard_items(*(np.ones(count) for count in counts), **options)


def one_update(batches: list[MicroBatch]) -> Counter[tuple[int, float]]:
    """Items of an update with their share in its gradient, copies without weight left out."""
    return Counter(
        (item, round(factor, 6)) for items, factor in batches if factor for item in items.tolist()
    )


def test_every_item_is_dealt_once_and_processes_take_equal_steps() -> None:
    """21 items, at most 2 * 2 * 2 an update: three of seven, whose items weigh 8/7."""
    options: dict[str, Any] = {"batch_size": 2, "accumulate": 2, "world_size": 2, "seed": (4,)}
    ranks = [dealt(21, rank=rank, **options) for rank in range(2)]
    assert len(ranks[0]) == len(ranks[1]) == 6
    assert all(1 <= len(items) <= 2 for batches in ranks for items, _ in batches)
    found = [one_update([*ranks[0][at : at + 2], *ranks[1][at : at + 2]]) for at in (0, 2, 4)]
    assert [len(update) for update in found] == [7, 7, 7]
    assert {factor for update in found for _, factor in update} == {round(8 / 7, 6)}
    assert sorted(item for update in found for item, _ in update) == list(range(21))


def test_items_are_spread_evenly_over_updates() -> None:
    """65 at 64 an update: 33 and 32, never a step from a single row."""
    found = [(len(items), factor) for items, factor in dealt(65, batch_size=64)]
    assert found == [(33, 64 / 33), (32, 2.0)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_update_mixes_passes(world_size: int) -> None:
    """Passes of 8 and 7 items, 6 an update: 4, 4, 4 and 3, each item once in its own pass."""
    step = 6 // world_size
    ranks = [
        dealt(8, 7, batch_size=1, accumulate=step, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    assert [len(batches) for batches in ranks] == [3 * step - (-3 // world_size)] * world_size
    updates = [
        one_update([one for batches in ranks for one in batches[at * step : (at + 1) * step]])
        for at in range(4)
    ]
    assert [sorted(update.values()) for update in updates] == [[1] * n for n in (4, 4, 4, 3)]
    assert [{factor for _, factor in update} for update in updates] == [{1.5}, {1.5}, {1.5}, {2.0}]
    items = [{item for item, _ in update} for update in updates]
    assert items[0] | items[1] == set(range(8))
    assert items[2] | items[3] == set(range(8, 15))


@pytest.mark.parametrize("count", [5, 16, 17, 21])
def test_two_processes_train_on_what_one_does_with_twice_the_accumulation(count: int) -> None:
    alone = dealt(count, batch_size=2, accumulate=4, seed=(1,))
    pair = [
        dealt(count, batch_size=2, accumulate=2, rank=rank, world_size=2, seed=(1,))
        for rank in (0, 1)
    ]
    for step in range(-(-count // 8)):
        both = [*pair[0][2 * step : 2 * step + 2], *pair[1][2 * step : 2 * step + 2]]
        assert one_update(alone[4 * step : 4 * step + 4]) == one_update(both)


def test_a_short_process_gets_copies_without_weight() -> None:
    """One item for two processes."""
    for rank, factor in ((0, 8.0), (1, 0.0)):
        ((items, found),) = dealt(1, batch_size=4, rank=rank, world_size=2)
        assert (items.tolist(), found) == ([0], factor)


def test_an_update_is_the_mean_over_the_rows_of_its_items() -> None:
    """Items of 4, 1 and 1 rows, three a batch: the sum over six rows is divided by three slots."""
    ((items, factor),) = shard_items(np.array([4.0, 1.0, 1.0]), batch_size=3)
    assert (sorted(items.tolist()), factor) == ([0, 1, 2], 0.5)


def test_a_copy_that_fills_up_keeps_the_scores_of_the_trained_batch() -> None:
    """Batches of other items may differ in rounding; the ratio begins at 1 all the same."""
    backbone = policy().float().eval()
    rl, records = module(backbone), decoded(backbone, 6)
    items = rl.rows.items(records)
    real, first, sixth = (torch.tensor(one) for one in (range(5), [0], [5]))
    units = items.units(real)
    fill_old_scores(rl, [MicroBatch(real, 1.0)], items)
    expected = items.old_log_prob[units]
    for batches in (
        [MicroBatch(real, 1.0), MicroBatch(first, 0.0), MicroBatch(sixth, 0.0)],
        [MicroBatch(first, 0.0), MicroBatch(sixth, 0.0), MicroBatch(real, 1.0)],
    ):
        fill_old_scores(rl, batches, items)
        assert items.old_log_prob[units].equal(expected)
        assert items.old_log_prob[items.units(sixth)].all()


def test_advantages_without_values_are_those_of_the_response() -> None:
    """Rewards 0 and 1 in each group of two: -1 and 1."""
    backbone = policy()
    rl, records = module(backbone), decoded(backbone, 6)
    items = rl.rows.items(records)
    found = fill_advantages(rl, items, advantage=GroupZScore(), batch_size=4)
    assert found.values is None
    noted = found.with_signals([*records, replace(records[0], uid="not trained on")])
    assert np.isnan(noted[-1].signals["commit_advantage"]).all()
    assert "commit_value" not in noted[0].signals
    table = unit_table(items, "advantage", 6)
    for row, record in enumerate(records):
        cells = answer_cells(record)
        assert noted[row].signals["commit_advantage"][cells].tolist() == table[row, cells].tolist()
        assert table[row, cells].unique().tolist() == [[-1.0], [1.0]][row % 2]


def test_token_rewards_flow_back_along_the_steps() -> None:
    """Without values a token gets what its own and later steps are paid, means within steps."""
    backbone = policy()
    rl, (first, second) = module(backbone), decoded(backbone, 2)
    given = [0.0] * 8
    cells = answer_cells(first)
    late = max(cells, key=lambda cell: first.commit_step[cell])
    given[late] = 2.0
    records = [replace(first, meta={**first.meta, "token_rewards": given}), second]
    items = rl.rows.items(records)
    fill_advantages(rl, items, advantage=RawReward(), batch_size=4)
    table = unit_table(items, "advantage", 2)
    last = [c for c in cells if first.commit_step[c] == first.commit_step[late]]
    earlier = [cell for cell in cells if cell not in last]
    assert table[0, late] == 2.0
    torch.testing.assert_close(
        table[0, earlier], torch.full((len(earlier),), 2.0 / len(last), dtype=torch.float64)
    )
    assert table[1, answer_cells(second)].unique().tolist() == [1.0]


@pytest.mark.parametrize("name", ["dream", "block from the sequence"])
@pytest.mark.parametrize("kind", ["lora", "full", "head"])
def test_values_are_read_at_the_states_of_the_decode(name: str, kind: Any) -> None:
    """Whatever is trained on, here random masks: g = l = 1 gives A = R - V of the trace's state."""
    backbone = policy(**FAMILIES[name]).eval()
    own = policy(**FAMILIES[name], initializer_range=0.2).eval() if kind == "full" else None
    rl = module(
        backbone,
        corruption=RandomMasking(min_t=0.5),
        value=ValueObjective(backbone=kind),
        value_backbone=own,
    )
    rl.double().eval()
    with torch.no_grad():
        rl.value_head.weight.normal_()
        for key, parameter in backbone.named_parameters():
            if ".lora_B.value." in key:
                parameter.normal_(std=0.3)
    records = decoded(backbone, 4)
    items = rl.rows.items(records)
    found = fill_advantages(rl, items, advantage=RawReward(), batch_size=3)
    reader = own or backbone
    for row, cell, advantage, returns in zip(
        items.record.tolist(), items.cell.tolist(), items.advantage, items.returns, strict=True
    ):
        record = records[row]
        assert returns == record.meta["reward"]
        ids = torch.from_numpy(record.canvas(int(record.commit_step[cell])).astype("int64"))
        with torch.no_grad(), backbone.using_adapter("value" if kind == "lora" else "default"):
            hidden = reader.denoise(
                ids[None], hidden_layers=(-1,), response_start=record.num_prompt
            ).hidden
            value = float(rl.value_head(hidden[0, record.num_prompt + cell]))
        assert abs(float(advantage) - (record.meta["reward"] - value)) < 1e-5
    means = []
    for record, row in zip(found.with_signals(records), found.members, strict=True):
        value, advantage = (record.signals[f"commit_{n}"] for n in ("value", "advantage"))
        cells = row[: record.num_generated].numpy()
        assert np.isnan(value[~cells]).all()
        expected = record.meta["reward"] - value[cells].astype(np.float32)
        np.testing.assert_allclose(advantage[cells], expected, atol=1e-2)
        means.extend(value[cells].tolist())
    assert np.ptp(means) > 0.1


@pytest.mark.parametrize("name", ["dream", "block from the response"])
def test_capped_rows_cap_the_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With g = l = 1 two rows a response have the advantages that they have among all rows."""
    backbone = policy(**FAMILIES[name]).eval()
    records = decoded(backbone, 6, per_step=1)
    tables, forwards = [], []
    for rows, given in ((None, {}), (2, {}), (2, {"gamma": 0.9})):
        rl = module(
            backbone,
            corruption=TraceMasking(padding="replayed", rows_per_sample=rows),
            value=ValueObjective(backbone="head", **given),
        )
        rl.double().eval()
        torch.nn.init.normal_(rl.value_head.weight, generator=torch.Generator().manual_seed(0))
        seen: list[int] = []
        plain = rl.values

        def values(batch: RolloutBatch, plain: Any = plain, seen: Any = seen) -> torch.Tensor:
            seen.append(len(batch.sample))
            return plain(batch)

        monkeypatch.setattr(rl, "values", values)
        items = rl.rows.items(records)
        found = fill_advantages(rl, items, advantage=RawReward(), batch_size=3)
        tables.append(unit_table(items, "advantage", 6))
        assert found.members.equal(~tables[-1].isnan()) or given
        forwards.append((sum(seen), len(items)))
    known = ~tables[1].isnan()
    torch.testing.assert_close(tables[1][known], tables[0][known], rtol=0, atol=1e-6)
    assert known.sum() < (~tables[0].isnan()).sum()
    assert not torch.allclose(tables[2][known], tables[0][known])
    states, capped, discounted = forwards
    assert states[0] == states[1] == discounted[0]
    assert capped == (12, 12)


@pytest.mark.parametrize("words", [None, 12])
def test_old_log_probs_are_those_of_the_training_forward(words: int | None) -> None:
    """Those of the sampler, too, which never proposes tokens of pictures."""
    backbone = policy(text_vocab_size=words).eval()
    rl, records = module(backbone), decoded(backbone, 6)
    items = rl.rows.items(records)
    batches = shard_items(items.size.numpy(), batch_size=5)
    mismatch, _, count = fill_old_scores(rl, batches, items).tolist()
    table = unit_table(items, "old_log_prob", 6)
    for row, record in enumerate(records):
        cells = answer_cells(record)
        torch.testing.assert_close(
            table[row, cells], direct_log_probs(backbone, record)[cells], rtol=0, atol=1e-10
        )
    assert count > 20
    assert mismatch / count < 1e-6
    for numbers, factor in batches:
        batch = items.batch(numbers, factor=factor, num_slots=5)
        # The ratio is 1 at the first update, to the last bit.
        assert rl.score(batch).log_prob.equal(batch.old_log_prob)


def test_the_initial_policy_is_the_one_without_the_adapter() -> None:
    backbone = policy().eval()
    rl = module(backbone, objective=PolicyObjective(kl_to="initial"))
    records = decoded(backbone, 4)
    items, _ = prepared(rl, records)
    bare = policy(lora=False).eval()
    bare.load_state_dict(
        {
            key.replace(".base_layer", ""): value
            for key, value in backbone.state_dict().items()
            if ".lora_" not in key
        }
    )
    table = unit_table(items, "reference", 4)
    for row, record in enumerate(records):
        cells = answer_cells(record)
        torch.testing.assert_close(
            table[row, cells], direct_log_probs(bare, record)[cells], rtol=1e-6, atol=1e-6
        )


class Given:
    """Rollouts that are there already."""

    def __init__(self, records: list[Trajectory]) -> None:
        self.records = records

    def collect(self, step: int, cursor: int, **_: Any) -> Rollouts:
        return Rollouts(self.records, 3, {"rollout": 1.0})

    def close(self) -> None:
        """Nothing runs beside."""


def step_on(records: list[Trajectory], before: RLProgress, **options: Any) -> RLStep:
    rl = module(policy()).eval()
    return rl_step(rl, Given(records), rollout_data(batch_size=4, **options), before)


def test_an_rl_step_needs_no_trainer() -> None:
    """Rewards 0 and 1 in three groups, one dropped: -1 and 1 for the others, each state once."""
    rl, records = module(policy()).eval(), decoded(policy(), 6)
    records[:2] = [record.with_meta(kept=False) for record in records[:2]]
    told: list[tuple[str, int, int]] = []
    step = rl_step(
        rl,
        Given(records),
        rollout_data(batch_size=4),
        RLProgress(step=4, cursor=9, skipped=1, smoothed=1.0),
        report=lambda *one: told.append(one),
    )
    assert step.progress == RLProgress(step=5, cursor=12, skipped=1, smoothed=0.95)
    assert [record.uid for record in step.records] == [record.uid for record in records]
    dealt_items = [item for items, factor in step.batches if factor for item in items.tolist()]
    assert sorted(dealt_items) == every(step.items).tolist()
    rewards = [step.items.records[number].meta["reward"] for number in step.items.record.tolist()]
    assert set(zip(rewards, step.items.advantage.tolist(), strict=True)) == {
        (0.0, -1.0),
        (1.0, 1.0),
    }
    assert np.isnan(step.records[0].signals["commit_advantage"]).all()
    assert step.facts["rollout/items"] == len(step.items)
    assert step.facts["rollout/kept_groups"] == 2.0
    assert step.facts["rollout/mismatch"] < 1e-6
    batch = step.batch(0)
    assert rl.score(batch).log_prob.equal(batch.old_log_prob)
    assert told[-1] == ("old log-probabilities", len(step.batches), len(step.batches))


def test_an_rl_step_without_kept_groups_has_one_batch_without_weight() -> None:
    records = [record.with_meta(kept=False) for record in decoded(policy(), 6)]
    step = step_on(records, RLProgress(skipped=2), advantage=RawReward(), passes=2)
    assert step.progress == RLProgress(step=1, cursor=3, skipped=3, smoothed=0.5)
    assert step.facts["rollout/skipped_steps"] == 3.0
    assert step.facts["rollout/items"] == 0.0
    assert len(step.batches) == 1
    assert step.batch(0).is_empty
    assert not step.batch(0).weight.any()


class Wrong:
    """Gives one number too few, or one that is none."""

    def __init__(self, last: list[float]) -> None:
        self.last = last

    def compute(self, rewards: torch.Tensor) -> torch.Tensor:
        return torch.tensor([0.0, *self.last])


@pytest.mark.parametrize("last", [[], [float("nan")]])
def test_an_advantage_that_is_no_number_per_response_is_refused(last: list[float]) -> None:
    with pytest.raises(ValueError, match="advantage: Wrong must give 2 finite numbers"):
        step_on(decoded(policy(), 6), RLProgress(), advantage=Wrong(last))
