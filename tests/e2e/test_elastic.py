"""Runs that go on with another number of processes, 2, 1, then 3, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lit_dlm.reports.reward_curve import read_points
from lit_dlm.trajectories.store import TrajectoryShardReader, completed_uids
from tests.e2e.runs import ROOT, run
from tests.processes import in_processes

pytestmark = [pytest.mark.slow, pytest.mark.ddp]

PREDICT = [
    "predict",
    "--config=configs/exp/generate_tiny.yaml",
    "--data.tasks=[{class_path: WordProblems, init_args: {split: train, num_examples: 13}}]",
    "--data.batch_size=2",
    "--data.methods=[threshold_07]",
    "--model.level=tokens",
    "--model.projector_dir=null",
]
RL = [
    "fit",
    "--config=configs/exp/tracerl_tiny.yaml",
    "--trainer.max_epochs=3",
    "--trainer.num_sanity_val_steps=0",
    "--trainer.logger=false",
    "--data.prompts_per_step=4",
    "--data.responses_per_prompt=4",
    "--data.batch_size=2",
    "--data.rows_per_update=12",
    "--model.corruption.shrink=4",
    "--data.rollout_batch_size=4",
    # AdamW makes a step of a hundredth of the rate from a gradient that is nothing but rounding.
    "--model.optimizer={class_path: torch.optim.SGD, init_args: {lr: 0.1}}",
    "--data.filters=null",
    "--data.val_tasks=null",
]

SHARDED = [
    "fit",
    "--config=configs/exp/sft_gt_tiny.yaml",
    "--config=configs/trainer/fsdp_cpu.yaml",
    "--trainer.enable_progress_bar=false",
    "--trainer.logger=false",
    "--trainer.max_steps=6",
    "--data.batch_size=2",
    "--data.rows_per_update=4",
    "--data.sources.init_args.tasks.init_args.num_examples=40",
]


def callbacks(at: Path) -> str:
    """What saves every RL step of a run, its curve and its weights."""
    saved = {"dirpath": str(at / "saved"), "filename": "{epoch}", "save_top_k": -1}
    given = {
        "lightning.pytorch.callbacks.ModelCheckpoint": saved,
        "RewardCurve": {"folder": str(at)},
        "AdapterCheckpoint": {"folder": str(at / "adapter"), "keep_epochs": False},
    }
    listed = [{"class_path": path, "init_args": options} for path, options in given.items()]
    return f"--trainer.callbacks={json.dumps(listed)}"


def on(count: int) -> list[str]:
    ddp = "--config=configs/trainer/ddp_cpu.yaml"
    return [ddp, f"--trainer.devices={count}", "--trainer.enable_progress_bar=false"]


def decode(rank: int, count: int, folder: Path, *flags: str) -> None:
    torch.set_num_threads(1)
    run(*PREDICT[:2], *on(count), *PREDICT[2:], f"--run_dir={folder}", *flags)


def learn(rank: int, count: int, folder: Path, cut: Path | None) -> None:
    torch.set_num_threads(1)
    at = folder / str(count)
    resume = [] if cut is None else [f"--ckpt_path={cut}"]
    run(*RL[:2], *on(count), *RL[2:], f"--run_dir={at}", callbacks(at), *resume)


def fine_tune(rank: int, count: int, at: Path, cut: Path | None) -> None:
    torch.set_num_threads(1)
    init = {"dirpath": str(at), "filename": "{step}", "every_n_train_steps": 2, "save_top_k": -1}
    saver = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": init}
    resume = [] if cut is None else [f"--ckpt_path={cut}"]
    callbacks = f"--trainer.callbacks={json.dumps([saver])}"
    run(*SHARDED, f"--trainer.devices={count}", f"--run_dir={at}", callbacks, *resume)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elastic")


@pytest.fixture(autouse=True)
def _root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_decoding_goes_on_with_any_number_of_processes(folder: Path) -> None:
    """13 prompts of unequal length and 7 to 20 steps; a stop after each process's first batch."""
    in_processes(1, decode, 1, folder)
    moved, done = folder / "moved", []
    for count in (2, 1, 3):
        flags = [] if count == 3 else ["--trainer.limit_predict_batches=1"]
        in_processes(count, decode, count, moved, *flags, seconds=100)
        done.append(len(completed_uids(moved / "traces")))
    assert 0 < done[0] < done[1] < done[2] == 13
    whole, parts = (
        {
            one.uid: (one.digest(), one.meta["correct"], one.num_steps)
            for one in TrajectoryShardReader(at / "traces")
        }
        for at in (folder, moved)
    )
    assert parts == whole
    assert len({steps for _, _, steps in whole.values()}) > 3


def test_reinforcement_learning_goes_on_with_any_number_of_processes(folder: Path) -> None:
    """Two processes all the way; one from their first step on; three from its second one on."""
    in_processes(2, learn, 2, folder, None)
    in_processes(1, learn, 1, folder, folder / "2" / "saved" / "epoch=0.ckpt")
    in_processes(3, learn, 3, folder, folder / "1" / "saved" / "epoch=1.ckpt")
    file = "adapter/last/adapter_model.safetensors"
    weights = [load_file(folder / str(count) / file) for count in (2, 1, 3)]
    curves = [read_points(folder / str(count) / "reward_curve.jsonl") for count in (2, 1, 3)]
    for first, found, points in zip((2, 3), weights[1:], curves[1:], strict=True):
        torch.testing.assert_close(found, weights[0], rtol=0, atol=1e-6)
        rewards, wanted = (
            [point["rollout/reward"] for point in one if point["step"] >= first]
            for one in (points, curves[0])
        )
        assert rewards == wanted
    assert all(point["rollout/reward_std"] > 0 for point in curves[0] if point["step"] > 1)
    moved = [value.abs().max() for key, value in weights[0].items() if "lora_B" in key]
    assert max(moved) > 1e-3


def test_sharded_training_goes_on_with_any_number_of_processes(folder: Path) -> None:
    """Checkpoint folders of FSDP2: two processes all the way; one after two steps; two again."""
    whole, one, two = (folder / f"sharded {name}" for name in ("whole", "one", "two"))
    in_processes(2, fine_tune, 2, whole, None)
    in_processes(1, fine_tune, 1, one, whole / "step=2.ckpt")
    in_processes(2, fine_tune, 2, two, one / "step=4.ckpt")
    assert (one / "step=4.ckpt").is_dir()
    expected = load_file(whole / "adapter" / "adapter_model.safetensors")
    for at in (one, two):
        found = load_file(at / "adapter" / "adapter_model.safetensors")
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert max(value.abs().max() for key, value in expected.items() if "lora_B" in key) > 1e-3
