"""Distil, fine-tune and evaluate through the command line, on the embedded model."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from lit_dlm.reports.command import main as report
from tests.e2e.runs import ROOT, fails, results, run

EXP = ROOT / "configs" / "exp"
QUIET = ("--trainer.enable_progress_bar", "false")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty-four graded decodes."""
    folder = tmp_path_factory.mktemp("distilled")
    tasks = "[{class_path: WordProblems, init_args: {split: train, num_examples: 24}}]"
    run(
        "predict", "--config", str(EXP / "distill_tiny.yaml"), "--run_dir", str(folder),
        "--data.tasks", tasks, *QUIET,
    )  # fmt: skip
    return folder


@pytest.fixture
def run_dir(distilled: Path, tmp_path: Path) -> Path:
    shutil.copytree(distilled / "traces", tmp_path / "traces")
    return tmp_path


def fit(name: str, run_dir: Path, *flags: str) -> None:
    run(
        "fit", "--config", str(EXP / name), "--run_dir", str(run_dir), "--data.batch_size", "8",
        "--data.val_fraction", "0",
        "--trainer.logger", "false", *QUIET, *flags,
    )  # fmt: skip


def evaluate(run_dir: Path, *flags: str) -> dict[str, bool]:
    """Uid to verdict on twelve problems."""
    tasks = "[{class_path: WordProblems, init_args: {split: test, num_examples: 12}}]"
    run(
        "predict", "--config", str(EXP / "evaluate_tiny.yaml"), "--run_dir", str(run_dir),
        "--data.tasks", tasks, *QUIET, *flags,
    )  # fmt: skip
    (rows,) = results(run_dir).values()
    assert len(rows) == 12
    return {row.completion: row.correct for row in rows}


def test_a_tabom_adapter_decodes_through_predict_with_one_flag(run_dir: Path) -> None:
    fit(
        "tabom_tiny.yaml", run_dir, "--trainer.max_steps", "6",
        "--model.optimizer.init_args.lr", "0.02", "--model.warmup_steps", "0",
    )  # fmt: skip
    plain = evaluate(run_dir / "plain")
    adapter = str(run_dir / "adapter")
    tuned = evaluate(run_dir / "tuned", "--model.backbone.init_args.adapter", adapter)
    assert plain != tuned
    settings = json.loads(
        (run_dir / "tuned/results/word_problems/entropy/settings.json").read_text()
    )
    assert settings["backbone"]["adapter_sha256"]
    report([str(run_dir / "plain"), str(run_dir / "tuned"), "--out", str(run_dir / "table")])
    table = (run_dir / "table" / "summary.md").read_text()
    assert "| plain |" in table
    assert "| tuned |" in table


def test_a_recipe_goes_on_from_its_last_checkpoint(run_dir: Path) -> None:
    """The second call trains the second epoch only; checkpoints hold nothing but the adapter."""
    name, folder = "tabom_dream_prm12k_tiny.yaml", run_dir / "dream_prm12k"
    fit(name, run_dir, "--trainer.max_epochs", "1", "--ckpt_path", "last")
    first = (folder / "adapters" / "epoch-00" / "adapter_model.safetensors").read_bytes()
    fit(name, run_dir, "--trainer.max_epochs", "2", "--ckpt_path", "last")
    assert sorted(path.name for path in (folder / "adapters").iterdir()) == [
        "epoch-00",
        "epoch-01",
        "last",
    ]
    assert (folder / "adapters/epoch-00/adapter_model.safetensors").read_bytes() == first
    stored = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert stored["epoch"] == 1
    assert all("lora_" in key for key in stored["state_dict"])


@pytest.mark.parametrize("name", ["dream_ling_coder", "llada_prm12k", "llada_ling_coder"])
def test_the_other_recipes_run(run_dir: Path, name: str) -> None:
    tasks = "--data.sources.init_args.tasks=[word_problems]"
    fit(f"tabom_{name}_tiny.yaml", run_dir, "--trainer.max_epochs", "1", tasks)
    assert (run_dir / name / "adapters" / "last" / "adapter_config.json").is_file()


def test_reference_answers_are_as_many_as_the_comparison_takes() -> None:
    """The script and its page promise equally many examples for every method."""
    config = yaml.safe_load((EXP / "sft_gt_tiny.yaml").read_text())
    (task,) = config["data"]["init_args"]["sources"][0]["init_args"]["tasks"]
    page = (ROOT / "docs" / "tabom_results.md").read_text()
    (limit,) = set(re.findall(r"--data\.limit (\d+)", page))
    assert task["init_args"]["num_examples"] >= int(limit)


@pytest.mark.parametrize("name", ["sft_gt_tiny", "sft_sd_tiny"])
def test_both_baselines_run(run_dir: Path, name: str) -> None:
    fit(f"{name}.yaml", run_dir, "--trainer.max_steps", "2")
    assert list(run_dir.glob("**/adapter/adapter_config.json"))


def test_missing_traces_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = fails(
        capsys, "fit", "--config", str(EXP / "tabom_tiny.yaml"), "--run_dir", str(tmp_path)
    )
    assert "there is no such folder of shards" in error
