"""What a row counts in an update, however rows are packed, drawn and dealt."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_dlm.callbacks import RewardCurve
from lit_dlm.losses.corruption import TraceMasking
from lit_dlm.rewards import Reward, RewardScore, Rollout
from lit_dlm.rl.module import TraceRLModule
from lit_dlm.rl.settings import ValueObjective
from lit_dlm.rl.step import fill_old_scores, shard_items
from tests.rollouts import answer_cells, decoded, fit, learner, module, policy, rollout_data


class HashReward(Reward):
    """Arbitrary numbers, so that every response differs."""

    name = "hash"

    def score(self, group: Sequence[Rollout]) -> list[RewardScore]:
        return [RewardScore(total=zlib.crc32(r.text.encode()) % 100 / 100) for r in group]


def flat(values: Any) -> torch.Tensor:
    return torch.cat([value.detach().flatten() for value in values])


def standing(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([{**group, "lr": 0.0} for group in params])


def gradient_of_one_response(rl: TraceRLModule) -> tuple[frozenset[Any], torch.Tensor]:
    """Of one update on the response that has most items, each pushing its tokens elsewhere."""
    records = [max(decoded(rl.backbone, 12), key=lambda record: len(answer_cells(record)))]
    items = rl.rows.items(records)
    items.advantage = items.cell.float() - 2.5
    (share,) = shard_items(items.size.numpy(), batch_size=50)
    fill_old_scores(rl, [share], items)
    batch = items.batch(share.items, factor=share.factor, num_slots=50)
    rl.zero_grad()
    rl.training_step(batch).backward()
    rows = frozenset(tuple(row) for row in items.supervised.tolist())
    return rows, flat(p.grad for p in rl.parameters() if p.grad is not None)


@pytest.mark.slow
def test_capped_rows_have_the_gradient_of_all_on_average() -> None:
    """Two of four rows: the mean over all six pairs is the gradient without a cap."""
    every = module(policy(), corruption=TraceMasking(padding="replayed")).eval()
    rows, whole = gradient_of_one_response(every)
    assert len(rows) == 4
    rl = module(policy(), corruption=TraceMasking(padding="replayed", rows_per_sample=2)).eval()
    found: dict[Any, torch.Tensor] = {}
    for seed in range(60):
        rl.rows.seed = seed
        pair, gradient = gradient_of_one_response(rl)
        found[pair] = gradient
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
