"""Reinforcement learning through the command line: run, resume, replay, and users' mistakes."""

import json
import os
import signal
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from torch import Tensor

from lit_dlm.backbones import load_tokenizer
from lit_dlm.reports.plots import read_points
from lit_dlm.reports.viewer import position_signals
from lit_dlm.rewards import RewardModel
from lit_dlm.toy import WordProblems
from lit_dlm.trajectories.store import TrajectoryShardReader
from tests.e2e.runs import fails, problems, run, start, traces
from tests.rewards.classifiers import save_classifier
from tests.rewards.groups import rollout
from tests.rewards.judge_server import JudgeServer

pytestmark = pytest.mark.slow

SMALL = f"""--config=exp/tracerl_tiny --config=method/value_tiny --trainer.enable_progress_bar=false
    --trainer.check_val_every_n_epoch=1 --data.prompts_per_step=3 --data.responses_per_prompt=4
    --data.filters=null --model.val_method=["evaluation","rollout"]
    --data.val_tasks={problems(6)}""".split()


def adapter(folder: Path, name: str = "last") -> dict[str, Tensor]:
    return load_file(folder / "policy" / name / "adapter_model.safetensors")


def test_run_resume_and_replay(tmp_path: Path) -> None:
    at = f"--run_dir={tmp_path}"
    run("fit", *SMALL, at, "--trainer.max_epochs=1")
    first = read_points(tmp_path / "reward_curve.jsonl")
    assert [point["step"] for point in first] == [0, 1]
    assert 0.0 < first[0]["val/reward"] <= 1.0
    assert first[1]["val/rollout/num_prompts"] == first[1]["val/num_prompts"] == 6
    assert {"time/rollout", "time/reward", "time/train", "train/ratio"} <= first[1].keys()
    last = tmp_path / "checkpoints" / "last.ckpt"
    run("fit", *SMALL, at, "--trainer.max_epochs=2", f"--ckpt_path={last}")
    points = read_points(tmp_path / "reward_curve.jsonl")
    assert points[:2] == first
    assert points[2]["step"] == 2
    assert points[2]["updates"] > points[1]["updates"]
    assert (tmp_path / "reward_curve.png").stat().st_size > 1000
    records = list(TrajectoryShardReader(tmp_path / "rollouts"))
    assert len(records) == 24
    assert {record.meta["policy_version"] for record in records} == {0, points[1]["updates"]}
    assert all({"commit_value", "commit_advantage"} <= record.signals.keys() for record in records)
    assert {"value", "advantage"} <= position_signals(records[0]).keys()
    weights = adapter(tmp_path)
    assert weights
    assert all("lora" in name and "value" not in name for name in weights)
    scores = json.loads((tmp_path / "policy" / "scores.json").read_text())["scores"]
    assert scores == {f"epoch-{n:02d}": points[n + 1]["val/reward"] for n in (0, 1)}
    best = adapter(tmp_path, "best")
    is_last = points[2]["val/reward"] > points[1]["val/reward"]
    assert all(best[name].equal(weight) for name, weight in weights.items()) == is_last

    replay = tmp_path / "replay"
    shards = ["--data.source=shards", f"--data.shards={tmp_path / 'rollouts'}"]
    once = ["--trainer.max_epochs=1", "--trainer.num_sanity_val_steps=0"]
    run("fit", *SMALL, f"--run_dir={replay}", *once, *shards)
    again = read_points(replay / "reward_curve.jsonl")[0]
    for name, value in first[1].items():
        if name.startswith(("train/", "val/", "rollout/")):
            assert again[name] == value, name


STEPS = [*SMALL, "--trainer.max_epochs=3", "--trainer.check_val_every_n_epoch=3"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three RL steps without a break."""
    folder = tmp_path_factory.mktemp("whole")
    run("fit", *STEPS, f"--run_dir={folder}")
    return folder


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 128 + signal.SIGTERM)],
)
def test_a_killed_run_goes_on_as_if_it_had_not_been(
    whole: Path, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    """After the first of three RL steps: same curve, weights and rollouts, each once."""
    folder = tmp_path / "run"
    last = folder / "checkpoints" / "last.ckpt"
    process = start(tmp_path / "log", "fit", *STEPS, f"--run_dir={folder}")
    while not last.exists() and process.is_alive():
        time.sleep(0.02)
    assert process.is_alive(), (tmp_path / "log/err").read_text()[-4000:]
    os.killpg(process.pid, number)
    process.join()
    assert process.exitcode == status
    assert len(read_points(folder / "reward_curve.jsonl")) < 4
    run("fit", *STEPS, f"--run_dir={folder}", f"--ckpt_path={last}")
    curves = [read_points(folder / "reward_curve.jsonl") for folder in (whole, folder)]
    for expected, found in zip(*curves, strict=True):
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert found[name] == value or name.startswith("time/"), name
    ours, theirs = adapter(whole), adapter(folder)
    assert all(weight.equal(theirs[name]) for name, weight in ours.items())
    assert traces(whole / "rollouts").keys() == traces(folder / "rollouts").keys()


def test_a_judge_pays_the_parts_of_responses(tmp_path: Path) -> None:
    """A local judge that dislikes odd sums of digits; tokens are paid where responses differ."""
    server = JudgeServer(lambda shown: sum(int(sign) for sign in shown if sign.isdigit()) % 2 == 1)
    judge = {"class_path": "HttpStepJudge", "init_args": {"url": server.url, "model": "judge"}}
    process = {"judge": judge, "reward_chunk_length": 4, "k_sample": 2}
    rewards = [
        {"class_path": "Graded", "init_args": {"weight": 0.0}},
        {"class_path": "ProcessReward", "init_args": process},
    ]
    flags = ["--trainer.max_epochs=1", "--trainer.num_sanity_val_steps=0"]
    flags += ["--data.prompts_per_step=10", f"--data.rewards={json.dumps(rewards)}"]
    with closing(server):
        run("fit", "--config=exp/tracerl_tiny", *SMALL[1:], f"--run_dir={tmp_path}", *flags)
    records = list(TrajectoryShardReader(tmp_path / "rollouts"))
    chunks = sum(-(-min(record.meta["num_tokens"] + 1, 32) // 4) for record in records)
    assert len(server.requests) == 2 * chunks
    assert {"role", "content"} <= server.requests[0]["messages"][0].keys()
    paid = [np.flatnonzero(record.meta["token_rewards"]) for record in records]
    assert any(len(cells) for cells in paid)
    for record, cells in zip(records, paid, strict=True):
        if len(cells):
            steps = record.commit_step[cells]
            advantage = record.signals["commit_advantage"].astype(np.float32)
            late = (record.commit_step > steps.max()) & ~np.isnan(advantage)
            assert (advantage[late] == 0.0).all()  # nothing is paid after the last part
    assert any(np.unique(r.signals["commit_advantage"]).size > 2 for r in records)
    point = read_points(tmp_path / "reward_curve.jsonl")[-1]
    assert {"rollout/reward/process", "train/policy_loss"} <= point.keys()


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["fit", *SMALL, f"--run_dir={tmp_path}", "--trainer.num_sanity_val_steps=0"]
    assert "nowhere" in fails(capsys, *small, "--data.source=shards", "--data.shards=nowhere")
    told = fails(capsys, *small, "--model.method=greedy")
    assert "method: expected 'rollout' or 'evaluation'" in told


def test_a_reward_model_is_one_line(tmp_path: Path) -> None:
    path = str(save_classifier(tmp_path / "reward"))
    arguments = {"path": path, "dtype": "float32"}
    rewards = json.dumps([{"class_path": "RewardModel", "init_args": arguments}])
    flags = ["--trainer.max_epochs=1", f"--data.rewards={rewards}"]
    run("fit", *SMALL, f"--run_dir={tmp_path}", *flags)
    *_, point = read_points(tmp_path / "reward_curve.jsonl")
    assert point["updates"] > 0
    records = list(TrajectoryShardReader(tmp_path / "rollouts"))
    assert len(records) == 12
    model, tokenizer = RewardModel(**arguments), load_tokenizer("tiny")
    examples = {one.uid: one for one in WordProblems("train", num_examples=400).examples()}
    for record in records:
        ids = record.tokens.tolist()
        end = ids.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in ids else len(ids)
        text = tokenizer.decode(ids[:end], skip_special_tokens=True)
        (uid,) = (uid for uid in examples if record.uid.startswith(uid))
        (score,) = model.score([rollout(text, example=examples[uid])])
        assert record.meta["reward"] == pytest.approx(score.total, abs=1e-4)
