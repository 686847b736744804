"""RL steps on two processes, with DDP and FSDP2, against one process; some on the command line."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from peft.tuners.lora import LoraLayer
from torch.distributed.tensor import DTensor

from lit_dlm.backbones.lora import LoRASettings
from lit_dlm.callbacks import RewardCurve, RolloutWriter
from lit_dlm.decoding import BlockCache, CacheScheme, DualCache, PrefixCache
from lit_dlm.rewards import RewardScore, Rollout, SpreadFilter
from lit_dlm.rl.module import TraceRLModule
from lit_dlm.rl.settings import ValueObjective
from lit_dlm.toy.word_problems import WordProblems
from lit_dlm.trajectories.store import TrajectoryShardReader
from tests.finetuning.runs import trained, two_processes
from tests.processes import in_two_processes
from tests.rollouts import FAMILIES, DigitReward, DropAll, fit, learner, policy, rollout_data

pytestmark = [pytest.mark.slow, pytest.mark.ddp]

Weights = dict[str, NDArray[Any]]

CASES = [("ddp", "lora"), ("fsdp", "lora"), ("ddp", "full"), ("fsdp", "full")]
"""Strategies and value models."""
PROMPTS: dict[str, Any] = {
    "prompts_per_step": 3,
    "rollout_batch_size": 2,
    "val_tasks": [WordProblems("test", num_examples=3)],
}


def trained_weights(rl: torch.nn.Module) -> Weights:
    """Whole trained weights, which sharded processes gather together."""
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).numpy().copy()
        for name, value in trained(rl).items()
    }


def learning(kind: str) -> TraceRLModule:
    """A policy and a value model on its weights (``lora``) or with its own (``full``)."""
    if kind == "lora":
        value = ValueObjective(backbone="lora", lora=LoRASettings(rank=2), lr=1e-2)
        return learner(value=value)
    own = policy(vocab_size=462, lora=False, initializer_range=0.2)
    return learner(value=ValueObjective(backbone="full", lr=1e-2), value_backbone=own)


def two_rl_steps(
    folder: Path, *, kind: str = "lora", **options: Any
) -> tuple[Weights, list[dict[str, Any]], int, dict[str, set[bool]]]:
    """Three prompts: with two processes one has twice the rollouts of the other.

    Responses that end early take fewer forwards, too. One update per RL step.
    """
    rl = learning(kind)
    witness = Witness(rl)
    curve = RewardCurve(str(folder))
    sizes = {**PROMPTS, "batch_size": 4, "rows_per_update": 64, "val_responses": 2}
    data = rollout_data(rewards=[witness], filters=[SpreadFilter()], **sizes)
    callbacks = [curve, RolloutWriter(str(folder / "rollouts"))]
    trainer = fit(rl, data, folder, steps=2, callbacks=callbacks, **options)
    return trained_weights(rl), curve.points, trainer.global_step, witness.is_sharded


class Witness(DigitReward):
    """Looks at the weights while responses are scored, before they are let go."""

    def __init__(self, rl: TraceRLModule) -> None:
        self.rl = rl
        self.is_sharded: dict[str, set[bool]] = {}
        self.has_merged = False

    def score(self, group: Sequence[Rollout]) -> list[RewardScore]:
        for name, child in self.rl.named_children():
            parts = self.is_sharded.setdefault(name, set())
            parts |= {isinstance(value, DTensor) for value in child.parameters()}
        layers = [part for part in self.rl.backbone.modules() if isinstance(part, LoraLayer)]
        self.has_merged = bool(layers) and all(layer.active_adapter == [] for layer in layers)
        return super().score(group)


CACHES: dict[str, tuple[type[CacheScheme], dict[str, Any]]] = {
    "block": (BlockCache, FAMILIES["block from the sequence"]),
    "prefix": (PrefixCache, FAMILIES["dream"]),
    "dual": (DualCache, FAMILIES["llada"]),
}
WITH_CACHES = [("block", True), ("prefix", False), ("dual", True)]
CACHED = [("ddp", "block", True), *(("fsdp", cache, lora) for cache, lora in WITH_CACHES)]
"""Strategies, caches, and whether an adapter is trained."""


def with_cache(folder: Path, cache: str, lora: bool, **options: Any) -> tuple[Weights, bool]:
    """Weights after an RL step whose rollouts and validation decode with a cache."""
    scheme, family = CACHES[cache]
    rl = learner(cache=scheme(), family=family, lora=lora)
    witness = Witness(rl)
    data = rollout_data(rewards=[witness], **PROMPTS)
    fit(rl, data, folder, steps=1, num_sanity_val_steps=1, **options)
    return trained_weights(rl), witness.has_merged


def on_two_processes(rank: int, folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found: dict[str, Any] = {
            f"{name} {kind}": two_rl_steps(
                folder / f"{name} {kind}", kind=kind, devices=2, strategy=two_processes(name)
            )
            for name, kind in CASES
        }
    found["caches"] = {
        case: with_cache(
            folder, *case[1:], devices=2, accumulate_grad_batches=8, strategy=two_processes(case[0])
        )
        for case in CACHED
    }
    found["advice"] = [str(one.message) for one in caught if "sync_dist" in str(one.message)]
    # An RL step without a group to keep, where a skipped update must not leave one process waiting.
    rl = learner()
    before, nothing = trained_weights(rl), rollout_data(filters=[DropAll()])
    fit(rl, nothing, folder, steps=1, devices=2, strategy=two_processes("ddp"))
    found["rests"] = all(np.array_equal(before[n], w) for n, w in trained_weights(rl).items())
    return found


def test_two_processes_make_the_updates_of_one(tmp_path: Path) -> None:
    alone = {kind: two_rl_steps(tmp_path / kind, kind=kind) for kind in ("lora", "full")}
    both = in_two_processes(on_two_processes, tmp_path)
    uids = sorted(TrajectoryShardReader(tmp_path / "lora" / "rollouts").uids)
    for name, kind in CASES:
        expected, points, updates, _ = alone[kind]
        assert updates == 2
        logged = set.union(*map(set, points))
        assert {"val/reward", "train/loss", "train/value_explained"} <= logged
        for weights, curve, count, is_sharded in (found[f"{name} {kind}"] for found in both):
            assert count == 2
            # Of a value model with weights of its own nothing is gathered while the policy decodes.
            assert is_sharded["backbone"] == {False}
            assert is_sharded["value_head"] == {name == "fsdp"}
            if kind == "full":
                assert is_sharded["value_backbone"] == {name == "fsdp"}
            assert weights.keys() == expected.keys()
            for key, value in weights.items():
                np.testing.assert_allclose(value, expected[key], rtol=0, atol=1e-6, err_msg=key)
            for point, other in zip(curve, points, strict=True):
                assert point["rollout/reward"] == other["rollout/reward"]
                scores = ("train/", "val/", "rollout/mismatch")
                for score in filter(lambda key: key.startswith(scores), point | other):
                    difference = abs(point[score] - other[score])
                    assert difference < 1e-5 * max(1.0, abs(other[score])), (name, score)
        for ours, theirs in zip(*(found[f"{name} {kind}"][1] for found in both), strict=True):
            for key in ("time/rollout", "time/train"):  # means over both
                assert ours[key] == theirs[key]
        reader = TrajectoryShardReader(tmp_path / f"{name} {kind}" / "rollouts")
        assert sorted(reader.uids) == uids
        assert len(reader.shards) == 4  # one per RL step and process
    singles = {
        case: with_cache(tmp_path, *case, accumulate_grad_batches=16)[0] for case in WITH_CACHES
    }
    for found in both:
        for case in CACHED:
            weights, has_merged = found["caches"][case]
            assert has_merged == case[2]
            for key, value in weights.items():
                assert np.abs(value - singles[case[1:]][key]).max() < 1e-6, (case, key)
    for kind, (expected, _, _, _) in alone.items():
        start = trained_weights(learning(kind))
        moved = [key for key, value in start.items() if not np.array_equal(value, expected[key])]
        assert len(moved) > len(start) / 2
        assert not any("value_backbone.model.lm_head" in key for key in start)
    for found in both:
        assert found["rests"]
        assert not found["advice"]
