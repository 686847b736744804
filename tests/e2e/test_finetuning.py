"""Distil, fine-tune and evaluate through the command line, on the embedded model."""

import json
import logging
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from lit_dlm.backbones import load_tokenizer
from lit_dlm.reports.command import main as report
from lit_dlm.trajectories.store import TrajectoryShardReader
from lit_dlm.trajectories.tools.exchange import tabom_row
from tests.e2e.runs import QUIET, ROOT, fails, problems, results, run, write_jsonl

EXP = ROOT / "configs" / "exp" / "finetuning"
EVALUATE = ("predict", "--config=exp/evaluate_tiny")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unpainted")]


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty-four graded decodes."""
    folder = tmp_path_factory.mktemp("distilled")
    tasks = f"--data.tasks={problems(24, 'train')}"
    run("predict", "--config=exp/distill_tiny", f"--run_dir={folder}", tasks, *QUIET)
    return folder


@pytest.fixture
def run_dir(distilled: Path, tmp_path: Path) -> Path:
    shutil.copytree(distilled / "traces", tmp_path / "traces")
    return tmp_path


SIZES = ("--data.batch_size=8", "--data.val_fraction=0")


def fit(name: str, run_dir: Path, *flags: str) -> None:
    run("fit", *f"--config=exp/{name} --run_dir={run_dir}".split(), *SIZES, *QUIET, *flags)


def evaluate(run_dir: Path, *flags: str) -> dict[str, bool]:
    """Uid to verdict on twelve problems."""
    run(*EVALUATE, f"--run_dir={run_dir}", f"--data.tasks={problems(12)}", *QUIET, *flags)
    (rows,) = results(run_dir).values()
    assert len(rows) == 12
    return {row.completion: row.correct for row in rows}


def test_a_tabom_adapter_decodes_through_predict_with_one_flag(
    run_dir: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every step tells the command that goes on, and the list of runs that it is done."""
    caplog.set_level(logging.INFO)
    fast = ("--model.optimizer.init_args.lr=0.02", "--model.warmup_steps=0")
    fit("tabom_tiny", run_dir, "--trainer.max_steps=6", *fast)
    adapter = str(run_dir / "adapter")
    assert f"next: lit-dlm generate PROMPT --backbone tiny --adapter {adapter}" in caplog.text
    plain = evaluate(run_dir / "plain")
    assert f"next: lit-dlm report {run_dir / 'plain'}" in caplog.text
    tuned = evaluate(run_dir / "tuned", "--model.backbone.init_args.adapter", adapter)
    assert plain != tuned
    method = run_dir / "tuned/results/word_problems/entropy"
    assert json.loads((method / "settings.json").read_text())["backbone"]["adapter_sha256"]
    report([str(run_dir / "plain"), str(run_dir / "tuned"), "--out", str(run_dir / "table")])
    table = (run_dir / "table" / "summary.md").read_text()
    assert all(f"| {name}/entropy |" in table for name in ("plain", "tuned"))
    runs = str(run_dir / "plain"), str(run_dir / "tuned")
    assert f"next: lit-dlm compare {' '.join(runs)}\n" in capsys.readouterr().out
    run("runs", str(run_dir))
    assert capsys.readouterr().out.count(" done ") == 3


def test_a_recipe_goes_on_from_its_last_checkpoint(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second call trains the second epoch only; checkpoints hold nothing but the adapter.

    They are no checkpoint of the model without one, and a new run, or one of other settings, does
    not mix with this one.
    """
    name, folder = "tabom_dream_prm12k --config=method/tabom_tiny", run_dir
    fit(name, run_dir, "--trainer.max_epochs", "1", "--ckpt_path", "last")
    first = (folder / "adapters" / "epoch-00" / "adapter_model.safetensors").read_bytes()
    fit(name, run_dir, "--trainer.max_epochs", "2", "--ckpt_path", "last")
    kept = {path.name for path in (folder / "adapters").iterdir()}
    assert kept == {"epoch-00", "epoch-01", "last"}
    assert (folder / "adapters/epoch-00/adapter_model.safetensors").read_bytes() == first
    stored = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert stored["epoch"] == 1
    assert all("lora_" in key for key in stored["state_dict"])
    base = (f"--run_dir={run_dir}/base", f"--ckpt_path={folder}/checkpoints/last.ckpt")
    error = fails(capsys, *EVALUATE, *base, *QUIET)
    assert f"has no use here for {len(stored['state_dict'])} weights" in error
    again = ("fit", *f"--config=exp/{name} --run_dir={run_dir}".split(), *SIZES, *QUIET)
    error = fails(capsys, *again, "--trainer.max_epochs=1")
    assert f"run_dir: {folder} holds a fit, which goes on with --ckpt_path last; a new " in error
    error = fails(capsys, *again, "--ckpt_path=last", "--model.optimizer.lr=0.5")
    changed = "(model.optimizer.lr: 0.001, now 0.5); choose another --run_dir, or remove "
    assert f"{folder} holds a fit of other settings {changed}{folder / 'fit.yaml'}" in error
    (folder / "fit.yaml").unlink()
    error = fails(capsys, *again)
    assert f"{folder / 'adapters'}: expected a folder without weights" in error


def test_reference_answers_are_as_many_as_the_comparison_takes() -> None:
    """The script promises equally many examples for every method."""
    config = yaml.safe_load((EXP / "sft_gt_tiny.yaml").read_text())
    (task,) = config["data"]["init_args"]["sources"][0]["init_args"]["tasks"]
    script = (ROOT / "experiments" / "tuning.py").read_text()
    (limit,) = set(re.findall(r'"--data\.limit", (\d+)', script))
    assert task["init_args"]["num_examples"] >= int(limit)


@pytest.mark.parametrize(
    "name", ["dream_prm12k", "dream_ling_coder", "llada_prm12k", "llada_ling_coder"]
)
def test_a_recipe_takes_the_release_rows_as_its_comment_says(
    run_dir: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the release do not say whether they are right, and the filter of shards is gone."""
    config = EXP / f"tabom_{name}.yaml"
    (sources,) = re.findall(r"^#   --data\.sources '(.*)'$", config.read_text(), re.MULTILINE)
    (source,) = yaml.safe_load(sources)
    methods = source["init_args"]["methods"] or ["default"]
    tokenizer = load_tokenizer("tiny")
    reader = TrajectoryShardReader(run_dir / "traces", features=False)
    given = [tabom_row(record, tokenizer) for record in reader]
    kept = ("prompt", "response_token_ids", "decoding_order", "non_ltr_positions")
    rows = [{**{key: row[key] for key in kept}, "method": methods[-1]} for row in given]
    write_jsonl(run_dir / source["init_args"]["path"], rows)
    monkeypatch.chdir(run_dir)
    flags = """--run_dir=. --trainer.accelerator=cpu --trainer.devices=1 --trainer.strategy=auto
        --trainer.precision=32-true --trainer.deterministic=false --trainer.max_steps=1
        --model.backbone.path=tiny --model.backbone.dtype=float32 --model.tokenizer=tiny
        --model.window=4 --model.rank_window=4 --data.response_length=32"""
    run("fit", f"--config={config}", f"--data.sources={sources}", *flags.split(), *QUIET)
    (written,) = yaml.safe_load((run_dir / "fit.yaml").read_text())["data"]["init_args"]["sources"]
    assert written["class_path"].endswith("TABOMFile")
    assert written["init_args"]["only_correct"] is False


@pytest.mark.parametrize("name", ["tabom_tiny", "sft_gt_tiny --config=data/own_answers_tiny"])
def test_a_run_goes_on_from_its_last_checkpoint(
    run_dir: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Two steps, then two more, which end where four without a break do."""
    anew = f"nothing to go on from in {run_dir / 'checkpoints'}, starting anew"
    caplog.set_level("INFO")
    for steps, is_new in ((2, True), (4, False)):
        caplog.clear()
        fit(name, run_dir, "--trainer.max_steps", str(steps), "--ckpt_path", "last")
        assert (anew in caplog.messages) == is_new
        stored = run_dir / "checkpoints" / "last.ckpt"
        assert torch.load(stored, weights_only=True)["global_step"] == steps
    weights = [run_dir / "adapter", run_dir / "whole"]
    bare = ("--trainer.enable_checkpointing=false", "--trainer.callbacks=[]")
    place = (f"--trainer.default_root_dir={weights[1]}", f"--model.export_dir={weights[1]}")
    fit(name, run_dir, "--trainer.max_steps=4", *place, *bare)
    resumed, whole = (load_file(path / "adapter_model.safetensors") for path in weights)
    torch.testing.assert_close(resumed, whole)
