"""What a row counts in an update, however rows are packed, drawn and dealt."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_dlm.backbones.lora_settings import LoRASettings
from lit_dlm.callbacks import RewardCurve
from lit_dlm.losses.corruption import TraceMasking
from lit_dlm.rewards import Reward, RewardScore, Rollout
from lit_dlm.rl.advantages import RawReward
from lit_dlm.rl.items import RolloutItem, collate_items, order_of_writing
from lit_dlm.rl.module import TraceRLModule
from lit_dlm.rl.settings import ValueObjective
from lit_dlm.rl.step import Slot, fill_advantages, fill_old_scores, shard_items
from lit_dlm.trajectories.record import Trajectory
from tests.rollouts import (
    FAMILIES,
    answer_cells,
    decoded,
    fit,
    learner,
    module,
    policy,
    rollout_data,
)

BLOCK = {"attention": "block", "block_size": 4}


class HashReward(Reward):
    """Arbitrary numbers, so that every response differs."""

    name = "hash"

    def score(self, group: Sequence[Rollout]) -> list[RewardScore]:
        return [RewardScore(total=zlib.crc32(r.text.encode()) % 100 / 100) for r in group]


def flat(values: Any) -> torch.Tensor:
    return torch.cat([value.detach().flatten() for value in values])


def trained(rl: TraceRLModule) -> torch.Tensor:
    return flat(p for p in rl.parameters() if p.requires_grad)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2)


def standing(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([{**group, "lr": 0.0} for group in params])


def test_an_update_is_the_mean_over_the_rows_of_its_items() -> None:
    """Items of 4, 1 and 1 rows, three a batch: the sum over six rows is divided by three slots."""
    (batch,) = shard_items([4.0, 1.0, 1.0], batch_size=3)[0]
    assert sorted(batch, key=lambda slot: slot.item) == [Slot(n, 0.5) for n in range(3)]


def one_update(
    folder: Path, *, packing: int, accumulate: int, max_tokens: int | None = None
) -> tuple[torch.Tensor, float]:
    curve = RewardCurve(str(folder))
    rl = learner(family=BLOCK, packing=packing, optimizer=sgd)
    before = trained(rl)
    data = rollout_data(rewards=[HashReward()], batch_size=1, max_tokens_per_batch=max_tokens)
    fit(rl, data, folder, steps=1, callbacks=[curve], accumulate_grad_batches=accumulate)
    (point,) = curve.points
    assert point["updates"] == 1
    return trained(rl) - before, point["train/grad_norm_policy"]


@pytest.mark.slow
def test_packed_rows_make_the_update_of_separate_ones(tmp_path: Path) -> None:
    apart, norm = one_update(tmp_path / "1", packing=1, accumulate=1000)
    packed, packed_norm = one_update(tmp_path / "4", packing=4, accumulate=250)
    assert apart.abs().max() > 1e-3
    # The layers' norms are computed in float32 in any model, so another order of sums shows.
    torch.testing.assert_close(packed, apart, rtol=0, atol=1e-6)
    assert packed_norm == pytest.approx(norm, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("packing", [1, 4])
def test_batches_by_tokens_make_the_same_update(tmp_path: Path, packing: int) -> None:
    """Rows of about 30 tokens: hundreds of batches of one item, or as few as 400 tokens allow."""
    apart, norm = one_update(tmp_path / "1", packing=packing, accumulate=1000)
    together, same = one_update(tmp_path / "2", packing=packing, accumulate=1000, max_tokens=400)
    assert apart.abs().max() > 1e-3
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-6)
    assert same == pytest.approx(norm, rel=1e-4)


def one_response(rl: TraceRLModule) -> tuple[list[RolloutItem], list[Trajectory]]:
    """The items of the response that has most, each pushing its tokens elsewhere."""
    records = [max(decoded(rl.backbone, 12), key=lambda record: len(answer_cells(record)))]
    items = rl.rows.items(records)
    fill_advantages(rl, items, records, advantage=RawReward(), batch_size=8)
    for item in items:
        item.advantage = item.cells.float() - 2.5
    return items, records


def gradient_of(
    rl: TraceRLModule, items: list[RolloutItem], records: list[Trajectory]
) -> torch.Tensor:
    """Gradient of one update on all items."""
    (slots,) = shard_items([item.size for item in items], batch_size=50)[0]
    fill_old_scores(rl, [slots], items, records)
    chosen = [(items[slot.item], slot.factor) for slot in slots]
    rl.zero_grad()
    rl.training_step(collate_items(chosen, records, rl.row_spec, num_slots=50)).backward()
    return flat(p.grad for p in rl.parameters() if p.grad is not None)


@pytest.mark.slow
def test_capped_rows_have_the_gradient_of_all_on_average() -> None:
    """Two of four rows: the mean over all six pairs is the gradient without a cap."""
    every = module(policy(), corruption=TraceMasking(padding="replayed")).eval()
    items, records = one_response(every)
    assert len(items) == 4
    whole = gradient_of(every, items, records)
    rl = module(policy(), corruption=TraceMasking(padding="replayed", rows_per_sample=2)).eval()
    found: dict[Any, torch.Tensor] = {}
    for seed in range(60):
        rl.rows.seed = seed
        items, records = one_response(rl)
        pair = frozenset(tuple(item.cells.tolist()) for item in items)
        if pair not in found:
            found[pair] = gradient_of(rl, items, records)
    assert len(found) == 6
    mean = torch.stack(list(found.values())).mean(0)
    torch.testing.assert_close(mean, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.slow  # a whole RL step in each of four ways
def test_what_is_logged_does_not_depend_on_how_rows_are_dealt(tmp_path: Path) -> None:
    """The weights stand still, so that one update and several see the same."""
    found = []
    for batch_size, accumulate in ((96, 1), (8, 64), (1, 1000), (8, 1)):
        curve = RewardCurve(str(tmp_path / f"{batch_size}-{accumulate}"))
        rl = learner(value=ValueObjective(backbone="head", lr=0.0), optimizer=standing)
        torch.nn.init.normal_(rl.value_head.weight, std=0.1)
        data = rollout_data(rewards=[HashReward()], batch_size=batch_size, advantage="none")
        fit(
            rl,
            data,
            curve.folder,
            steps=1,
            callbacks=[curve],
            accumulate_grad_batches=accumulate,
        )
        found.append({k: v for k, v in curve.points[0].items() if k.startswith("train/")})
    names = ("loss", "policy_loss", "value_loss", "value_error", "value_explained", "entropy")
    first, *others, several = found
    assert all(abs(first[f"train/{name}"]) > 1e-2 for name in names)
    for other in others:
        for name in names:
            assert other[f"train/{name}"] == pytest.approx(first[f"train/{name}"], rel=1e-5)
    # Updates of different size count alike in the mean over updates, tokens always do.
    for name in ("value_error", "value_explained"):
        assert several[f"train/{name}"] == pytest.approx(first[f"train/{name}"], rel=1e-5)


@pytest.mark.parametrize("name", list(FAMILIES))
@pytest.mark.parametrize("shrink", [1, 2, 3])
def test_steps_of_returns_are_the_states_of_the_decode(name: str, shrink: int) -> None:
    """Padding that is written in steps of its own counts in both."""
    backbone = policy(**FAMILIES[name])
    corruption = TraceMasking(padding="replayed", shrink=shrink)
    value = ValueObjective(lora=LoRASettings(rank=2))
    rl = module(backbone, corruption=corruption, value=value)
    records = decoded(backbone, 12, per_step=1)
    _, responses = rl.rows.batch_of(records)
    steps, members = order_of_writing(responses, shrink=shrink)
    blocks = responses.blocks
    found: dict[int, list[set[int]]] = {}
    for item in rl.rows.items(records):
        cells = item.cells.tolist()
        kinds = [0] * len(cells) if blocks is None else blocks[item.record, item.cells].tolist()
        for kind in set(kinds):
            group = {cell for cell, k in zip(cells, kinds, strict=True) if k == kind}
            found.setdefault(item.record, []).append(group)
    for row, groups in found.items():
        numbers = steps[row][members[row]].unique().tolist()
        assert numbers == list(range(len(numbers)))
        expected = [
            set(((steps[row] == number) & members[row]).nonzero()[:, 0].tolist())
            for number in numbers
        ]
        assert sorted(map(sorted, groups)) == sorted(map(sorted, expected))
