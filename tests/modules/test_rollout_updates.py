"""Dealing, advantages and old log-probabilities of one RL step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lit_dlm.losses.corruption import RandomMasking
from lit_dlm.modules.objective import PolicyObjective, ValueObjective
from lit_dlm.modules.rollout_batch import RolloutBatch, collate_items
from lit_dlm.modules.rollout_updates import Slot, deal, fill_advantages, fill_old_scores
from tests.rollouts import (
    FAMILIES,
    answer_cells,
    decoded,
    direct_log_probs,
    module,
    policy,
    unit_table,
)


def as_is(batch: RolloutBatch) -> RolloutBatch:
    return batch


def one_update(batches: list[list[Slot]]) -> Counter[tuple[int, float]]:
    """Items of an update with their share in its gradient, copies without weight left out."""
    slots = [slot for batch in batches for slot in batch if slot.factor]
    return Counter((slot.item, round(slot.factor, 6)) for slot in slots)


def test_every_item_is_dealt_once_and_processes_take_equal_steps() -> None:
    """21 items in updates of 2 * 2 * 2: two full ones, and five whose items weigh 8/5."""
    every = [
        deal(21, batch_size=2, accumulate=2, rank=rank, world_size=2, seed=(4,))
        for rank in range(2)
    ]
    assert len(every[0]) == len(every[1]) == 6
    assert all(1 <= len(batch) <= 2 for batches in every for batch in batches)
    found = [
        one_update([*every[0][first : first + 2], *every[1][first : first + 2]])
        for first in (0, 2, 4)
    ]
    assert [len(update) for update in found] == [8, 8, 5]
    assert {factor for _, factor in found[1]} == {1.0}
    assert {factor for _, factor in found[2]} == {1.6}
    assert sorted(item for update in found for item, _ in update) == list(range(21))


@pytest.mark.parametrize("count", [5, 16, 17, 21])
def test_two_processes_train_on_what_one_does_with_twice_the_accumulation(count: int) -> None:
    alone = deal(count, batch_size=2, accumulate=4, seed=(1,))
    pair = [
        deal(count, batch_size=2, accumulate=2, rank=r, world_size=2, seed=(1,)) for r in (0, 1)
    ]
    steps = -(-count // 8)
    for step in range(steps):
        both = [*pair[0][2 * step : 2 * step + 2], *pair[1][2 * step : 2 * step + 2]]
        assert one_update(alone[4 * step : 4 * step + 4]) == one_update(both)


def test_a_short_process_gets_copies_without_weight() -> None:
    """One item for two processes."""
    assert deal(1, batch_size=4, rank=0, world_size=2) == [[Slot(0, 8.0)]]
    assert deal(1, batch_size=4, rank=1, world_size=2) == [[Slot(0, 0.0)]]


def test_advantages_without_values_are_those_of_the_response() -> None:
    """Rewards 0 and 1 in each group of two: -1 and 1."""
    backbone = policy()
    rl, records = module(backbone), decoded(backbone, 6)
    items = rl.rows.items(records)
    found = fill_advantages(rl, items, records, kind="group_zscore", batch_size=4, move=as_is)
    assert np.isnan(found.value_mean)
    more = replace(records[0], uid="not trained on")
    noted = found.noted([*records, more])
    assert np.isnan(noted[-1].signals["commit_advantage"]).all()
    assert "commit_value" not in noted[0].signals
    table = unit_table(items, "advantage", 6)
    for row, record in enumerate(records):
        signal = noted[row].signals["commit_advantage"]
        assert signal[answer_cells(record)].tolist() == table[row, answer_cells(record)].tolist()
        assert table[row, answer_cells(record)].unique().tolist() == [[-1.0], [1.0]][row % 2]


def test_token_rewards_flow_back_along_the_steps() -> None:
    """Without values a token gets what its own and later steps are paid, means within steps."""
    backbone = policy()
    rl, (first, second) = module(backbone), decoded(backbone, 2)
    given = [0.0] * 8
    late = max(answer_cells(first), key=lambda cell: first.commit_step[cell])
    given[late] = 2.0
    records = [replace(first, meta={**first.meta, "token_rewards": given}), second]
    items = rl.rows.items(records)
    fill_advantages(rl, items, records, kind="none", batch_size=4, move=as_is)
    table = unit_table(items, "advantage", 2)
    cells = answer_cells(first)
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
    found = fill_advantages(rl, items, records, kind="none", batch_size=3, move=as_is)
    reader = own or backbone
    for item in items:
        record = records[item.record]
        reward = record.meta["reward"]
        torch.testing.assert_close(item.returns, torch.full_like(item.returns, reward))
        for cell, advantage in zip(item.cells.tolist(), item.advantage.tolist(), strict=True):
            ids = torch.from_numpy(record.canvas(int(record.commit_step[cell])).astype("int64"))
            with torch.no_grad(), backbone.using_adapter("value" if kind == "lora" else "default"):
                hidden = reader.denoise(
                    ids[None], hidden_layers=(-1,), response_start=record.num_prompt
                ).hidden
                value = float(rl.value_head(hidden[0, record.num_prompt + cell]))
            assert abs(advantage - (reward - value)) < 1e-5
    known = found.noted(records)
    means = []
    for record, row in zip(known, found.members, strict=True):
        value, advantage = (record.signals[f"commit_{n}"] for n in ("value", "advantage"))
        cells = row[: record.num_generated].numpy()
        assert np.isnan(value[~cells]).all()
        expected = record.meta["reward"] - value[cells].astype(np.float32)
        np.testing.assert_allclose(advantage[cells], expected, atol=1e-2)
        means.extend(value[cells].tolist())
    assert abs(found.value_mean - np.mean(means)) < 1e-2
    assert found.value_mean != 0.0


def test_old_log_probs_are_those_of_the_training_forward() -> None:
    backbone = policy().eval()
    rl, records = module(backbone), decoded(backbone, 6)
    items = rl.rows.items(records)
    batches = deal(len(items), batch_size=5)
    sums = fill_old_scores(rl, batches, items, records, move=as_is)
    table = unit_table(items, "old_log_prob", 6)
    for row, record in enumerate(records):
        cells = answer_cells(record)
        torch.testing.assert_close(
            table[row, cells], direct_log_probs(backbone, record)[cells], rtol=0, atol=1e-10
        )
    assert sums["num_compared"] > 20
    assert sums["mismatch"] / sums["num_compared"] < 1e-6
    for slots in batches:
        chosen = [(items[slot.item], slot.factor) for slot in slots]
        batch = collate_items(chosen, records, backbone.spec, num_slots=5)
        batch.advantage = torch.ones_like(batch.advantage)
        # The ratio is 1 at the first update, to the last bit.
        assert rl.score(batch).log_prob.equal(batch.old_log_prob)


def test_behaviour_takes_the_samplers_record() -> None:
    backbone = policy().eval()
    rl = module(backbone, objective=PolicyObjective(old_log_prob="behaviour"), num_padding=None)
    records = decoded(backbone, 6)
    items = rl.rows.items(records)
    fill_old_scores(rl, deal(len(items), batch_size=5), items, records, move=as_is)
    drawn = 0
    for item in items:
        sampled = torch.from_numpy(records[item.record].signals["commit_log_prob"])[item.cells]
        known = sampled.isfinite()
        assert item.old_log_prob[known].equal(sampled[known])
        assert (item.weight[~known] == 0).all()  # the end-of-text fill drew nothing
        drawn += int(known.sum())
    assert drawn > 20
    bare = [replace(record, signals={}) for record in records]
    with pytest.raises(ValueError, match=r"r0\.0 holds no probabilities"):
        fill_old_scores(rl, [[Slot(0, 1.0)]], rl.rows.items(bare), bare, move=as_is)


def test_the_initial_policy_is_the_one_without_the_adapter() -> None:
    backbone = policy().eval()
    rl = module(backbone, objective=PolicyObjective(kl_to="initial"))
    records = decoded(backbone, 4)
    items = rl.rows.items(records)
    fill_old_scores(rl, deal(len(items), batch_size=5), items, records, move=as_is)
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
