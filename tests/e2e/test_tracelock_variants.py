"""An autoencoder, a second round and a sweep, on the command line."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lit_dlm.heads.scorer import AcceptanceScorer
from lit_dlm.trajectories.store import TrajectoryShardReader
from tests.e2e.runs import QUIET, fails, problems, results, run

pytestmark = pytest.mark.slow

CPU = ["--trainer.accelerator=cpu", "--trainer.devices=1"]
RANKS = ["--model.init_args.hidden_rank=8", "--model.init_args.delta_rank=4"]


def generate(name: str, run_dir: Path, *flags: str) -> list[str]:
    sizes = [f"--data.init_args.tasks={problems(24, 'train')}", "--data.init_args.batch_size=12"]
    return ["predict", f"--config=exp/{name}", f"--run_dir={run_dir}", *sizes, *RANKS, *CPU, *flags]


def fit(name: str, run_dir: Path, *flags: str) -> list[str]:
    sizes = ["--trainer.max_steps=4", "--trainer.val_check_interval=2", *QUIET]
    sizes += ["--data.init_args.batch_size=8", "--data.init_args.val_fraction=0.3"]
    return ["fit", f"--config=exp/{name}", f"--run_dir={run_dir}", *sizes, *flags]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces and the policy of a first round; half of every answer counts as right."""
    run_dir = tmp_path_factory.mktemp("first") / "run"
    decoders = "--model.init_args.decoders={threshold: {policy: ThresholdPolicy, quota: NoQuota}}"
    grade = "--trainer.callbacks.init_args.grade=true"
    run(*generate("generate_tiny", run_dir, decoders, grade,
                  "--model.init_args.projector_prompts=8"))  # fmt: skip
    run(*fit("tracelock_tiny", run_dir))
    return run_dir


def test_an_autoencoder_replaces_the_principal_components(first: Path, tmp_path: Path) -> None:
    (tmp_path / "traces").symlink_to(first / "traces")
    run(*fit("projector_tiny", tmp_path, *RANKS))
    run(*fit("tracelock_tiny", tmp_path, "--data.init_args.source=tokens",
             f"--model.init_args.projector={tmp_path / 'autoencoder'}"))  # fmt: skip
    scorer = AcceptanceScorer.load(tmp_path / "policy")
    assert scorer.projector.config.kind == "autoencoder"


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (97, "ProjectorConfig.hidden_rank: expected 1 to hidden_size=96, got 97"),
        (80, "expected at least 80 positions for hidden_rank=80 and delta_rank=4, got 64"),
    ],
)
def test_ranks_that_cannot_be_are_refused_before_anything_is_decoded(
    tmp_path: Path, rank: int, message: str, capsys, caplog
) -> None:
    small = ["--model.init_args.projector_prompts=1", "--data.init_args.response_length=16"]
    flags = [*small, f"--model.init_args.hidden_rank={rank}"]
    with caplog.at_level(logging.INFO, logger="lit_dlm.modules.generate"):
        assert message in fails(capsys, *generate("generate_tiny", tmp_path, *flags))
    assert "decoded" not in caplog.text


def test_second_round_mixes_traces_of_the_policy_itself(first: Path, tmp_path: Path) -> None:
    for name in ("traces", "projector", "policy"):
        (tmp_path / name).symlink_to(first / name)
    run(*generate("generate_tiny_round2", tmp_path))
    traces = list(TrajectoryShardReader(tmp_path / "traces_round2", features=True))
    assert len(traces) == 24
    assert {trace.uid.partition("@")[2] for trace in traces} == {"tracelock_09", "tracelock_099"}
    run(*fit("tracelock_tiny_round2", tmp_path, "--data.init_args.only_correct=false"))
    one, two = (
        load_file(tmp_path / name / "model.safetensors") for name in ("policy", "policy_round2")
    )
    assert any(not torch.equal(two[name], one[name]) for name in one)


def test_one_file_sweeps_the_front(first: Path, tmp_path: Path) -> None:
    (tmp_path / "policy").symlink_to(first / "policy")
    methods = ["entropy_8", "threshold_05", "threshold_09", "tracelock_09", "tracelock-cap_2"]
    flags = [f"--data.init_args.tasks={problems(4)}", f"--data.init_args.methods={methods}", *CPU]
    run("predict", "--config=exp/sweep_tiny", f"--run_dir={tmp_path}", *flags)
    rows = results(tmp_path / "sweep")
    assert {len(group) for group in rows.values()} == {4}
    assert all(row.nfe == 4 for row in rows["word_problems", "entropy_8"])
    records = json.loads((tmp_path / "sweep" / "summary.json").read_text())
    assert [r["method"] for r in records] == methods
    assert (tmp_path / "sweep" / "front.png").stat().st_size > 10_000
