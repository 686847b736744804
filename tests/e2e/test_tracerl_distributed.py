"""RL steps on two processes, with DDP and FSDP2, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from numpy.typing import NDArray

from callbacks import RewardCurve, RolloutWriter
from lit_dlm.backbones.lora import LoRASettings
from lit_dlm.modules.objective import ValueObjective
from lit_dlm.rewards import SpreadFilter
from lit_dlm.tasks.word_problems import WordProblems
from lit_dlm.trajectories.shards import TrajectoryShardReader
from tests.processes import in_two_processes
from tests.rollouts import DropAll, fit, learner, rollout_data

pytestmark = [pytest.mark.slow, pytest.mark.ddp]

Weights = dict[str, NDArray[Any]]


def trained_weights(rl: torch.nn.Module) -> Weights:
    """Whole trained weights, which sharded processes gather together."""
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value)
        .detach()
        .numpy()
        .copy()
        for name, value in rl.named_parameters()
        if value.requires_grad
    }


def two_rl_steps(
    folder: Path, *, accumulate: int, **options: Any
) -> tuple[Weights, list[dict[str, Any]], int]:
    """Three prompts: with two processes one has twice the rollouts of the other.

    Responses that end early take fewer forwards, too. One update per RL step.
    """
    rl = learner(value=ValueObjective(backbone="lora", lora=LoRASettings(rank=2), lr=1e-2))
    curve = RewardCurve(str(folder))
    data = rollout_data(
        prompts_per_step=3,
        rollout_batch_size=2,
        batch_size=4,
        filters=[SpreadFilter()],
        val_tasks=[WordProblems("test", num_examples=3)],
    )
    trainer = fit(
        rl,
        data,
        folder,
        steps=2,
        callbacks=[curve, RolloutWriter(str(folder / "rollouts"))],
        accumulate_grad_batches=accumulate,
        **options,
    )
    return trained_weights(rl), curve.points, trainer.global_step


def strategies() -> dict[str, Any]:
    return {
        "ddp": DDPStrategy(process_group_backend="gloo"),
        "fsdp": ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
        ),
    }


def on_two_processes(rank: int, folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        name: two_rl_steps(folder / name, accumulate=8, devices=2, strategy=strategy)
        for name, strategy in strategies().items()
    }
    # An RL step without a group to keep, where a skipped update must not leave one process waiting.
    rl = learner()
    before = trained_weights(rl)
    fit(
        rl,
        rollout_data(filters=[DropAll()]),
        folder,
        steps=1,
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
    )
    found["rests"] = all(np.array_equal(before[n], w) for n, w in trained_weights(rl).items())
    return found


def test_two_processes_make_the_updates_of_one(tmp_path: Path) -> None:
    alone, points, updates = two_rl_steps(tmp_path / "alone", accumulate=16)
    assert updates == 2
    start = trained_weights(learner())
    both = in_two_processes(on_two_processes, tmp_path)
    uids = sorted(TrajectoryShardReader(tmp_path / "alone" / "rollouts").uids)
    for name in ("ddp", "fsdp"):
        for weights, curve, count in (both[0][name], both[1][name]):
            assert count == 2
            assert weights.keys() == alone.keys()
            for key, value in weights.items():
                np.testing.assert_allclose(value, alone[key], rtol=0, atol=1e-6, err_msg=key)
            assert [point["rollout/reward"] for point in curve] == [
                point["rollout/reward"] for point in points
            ]
            for point, other in zip(curve, points, strict=True):
                for score in ("val/reward", "rollout/mismatch", "train/policy_loss"):
                    assert abs(point[score] - other[score]) < 1e-6, (name, score)
        reader = TrajectoryShardReader(tmp_path / name / "rollouts")
        assert sorted(reader.uids) == uids
        assert len(reader.shards) == 4  # one per RL step and process
    moved = [key for key, value in start.items() if not np.array_equal(value, alone[key])]
    assert len(moved) > len(start) / 2
    assert both[0]["rests"]
    assert both[1]["rests"]
