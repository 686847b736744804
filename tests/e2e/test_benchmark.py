"""Benchmark decoding through the command line on the embedded model."""

import json
from pathlib import Path

import pytest
import torch

from lit_dlm.backbones import load_backbone
from lit_dlm.backbones.export import save_adapter
from lit_dlm.backbones.lora import LoRASettings
from lit_dlm.backbones.tokenizer import load_tokenizer
from lit_dlm.grading import isolation_level
from lit_dlm.trajectories.store import TrajectoryShardReader
from tests.e2e.runs import ARCHITECTURE, QUIET, compact, fails, killed, problems, results, run
from tests.processes import in_processes

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unpainted")]

METHODS = ("random", "threshold_09", "drawn")
DRAWN = {"policy": "EntropyPolicy", "sampler": {"temperature": 1.0}}


def command(run_dir: Path, *flags: str, count: int = 12, methods: tuple[str, ...] = METHODS):
    """Of so many problems, in batches of 4."""
    decoders = {name: f"decode/{name}.yaml" for name in methods}
    decoders |= {"drawn": compact(DRAWN)} if "drawn" in methods else {}
    return (
        *("predict", "--config=exp/evaluate_tiny", f"--run_dir={run_dir}", *QUIET),
        *("--trainer.accelerator=cpu", "--model.level=tokens", f"--data.tasks={problems(count)}"),
        *("--data.batch_size=4", f"--data.methods=[{','.join(methods)}]"),
        *(f"--model.decoders.{name}={value}" for name, value in decoders.items()),
        *flags,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole") / "whole"
    run(*command(folder))
    return folder


def assert_every_row_has_its_trajectory(run_dir: Path) -> None:
    """Exactly one record per row, with the digest that the row names."""
    records = list(TrajectoryShardReader(run_dir / "trajectories"))
    digests = {record.uid: record.digest().hex() for record in records}
    assert len(digests) == len(records)
    rows = [row for group in results(run_dir).values() for row in group]
    assert {row.trajectory["uid"]: row.trajectory["digest"] for row in rows} == digests
    assert {row.trajectory["set"] for row in rows} == {"trajectories"}


def test_a_run_leaves_results_records_summary_table_plot_and_its_configuration(whole: Path):
    records = json.loads((whole / "summary.json").read_text())
    assert [(r["task"], r["method"], r["n"]) for r in records] == [
        ("word_problems", method, 12) for method in METHODS
    ]
    assert records[0]["nfe"] == 32.0
    assert records[1]["nfe"] < 32.0
    assert "| random |" in (whole / "summary.md").read_text()
    assert (whole / "front.png").stat().st_size > 10_000
    assert_every_row_has_its_trajectory(whole)


def test_results_of_code_say_what_it_ran_in(tmp_path: Path):
    code = {"num_examples": 2, "allow_code_execution": True}
    tasks = [{"class_path": "PythonFunctions", "init_args": code}]
    run(*command(tmp_path / "code", f"--data.tasks={compact(tasks)}"))
    level = isolation_level()
    for method in METHODS:
        folder = tmp_path / "code/results/python_functions" / method
        assert json.loads((folder / "settings.json").read_text())["isolation"] == level
    assert json.loads((tmp_path / "code/summary.json").read_text())[0]["isolation"] == level
    run("report", str(tmp_path / "code"), "--out", str(tmp_path / "report"))
    page = (tmp_path / "report/report.md").read_text()
    assert f"Code of python_functions ran in {level} when it was graded." in page


def _predict(rank: int, folder: Path, *flags: str) -> None:
    torch.set_num_threads(1)
    run(*command(folder, *flags))


@pytest.mark.ddp
def test_more_processes_than_samples_that_are_left_do_what_is_left(whole: Path, tmp_path: Path):
    """Eleven of twelve problems are done; three processes share the last one of each method."""
    run(*command(tmp_path, count=11))
    in_processes(3, _predict, tmp_path, "--trainer.devices=3")
    assert results(tmp_path) == results(whole)
    assert_every_row_has_its_trajectory(tmp_path)
    owners = {path.name for path in tmp_path.rglob("part-*.jsonl")}
    assert owners == {"part-r00000.jsonl", "part-r00001.jsonl", "part-r00002.jsonl"}


def test_a_killed_run_resumes_to_the_same_results_with_another_batch_size(
    whole: Path, tmp_path: Path
):
    small = command(tmp_path, "--data.batch_size=3")
    killed(tmp_path, *small, before=3, files="results/word_problems/*/part-*.jsonl")
    assert 0 < sum(len(rows) for rows in results(tmp_path).values()) < 36
    run(*small)
    assert results(tmp_path) == results(whole)
    assert_every_row_has_its_trajectory(tmp_path)


FULL = ("sequential", "entropy_bounded", "klass", "credit", "pc_sampler", "wino", "remdm",
        "confidence_prefix", "confidence_dual", "confidence_horizon_128", "threshold_09_prefix",
        "threshold_09_dual")  # fmt: skip
BLOCK = ("block_static", "block_dynamic", "token_editing")
PARTS = ("sub_blocks",)
PIPELINE = ("d2f",)


@pytest.mark.parametrize(
    "names", [FULL, BLOCK, PARTS, PIPELINE], ids=["full", "block", "parts", "pipeline"]
)
def test_shipped_decoders_with_caches_run_and_verify(tmp_path: Path, names: tuple[str, ...]):
    """A block-attention model decodes with its exact cache, a full one with the approximate ones.

    Every decode is captured, and running it again gives the same steps: the cache is part of the
    decoder that the set describes.
    """
    blocks = {"decoder": "qwen3", "family": "sdar", "attention": "block", "block_size": 4}
    blocks |= {
        BLOCK: {"edits_tokens": True},
        PARTS: {"block_size": 16, "shift": 1},
        PIPELINE: {"block_size": 32, "block_origin": "response", "whole_prompt": True},
    }.get(names, {})
    options = {"path": None, "architecture": {**ARCHITECTURE, **blocks}}
    model = compact({"class_path": "HFBackbone", "init_args": options})
    flags = [] if names is FULL else [f"--model.backbone={model}"]
    run(*command(tmp_path, *flags, count=2, methods=names))
    rows = results(tmp_path)
    assert {method for _, method in rows} == set(names)
    assert all(len(group) == 2 for group in rows.values())
    assert all(row.nfe > 0 for group in rows.values() for row in group)
    if names is FULL:
        run("traj", "verify", str(tmp_path / "trajectories"), "--level=3", "--backbone=tiny")


def test_what_changes_a_decode_is_recorded_and_verified(tmp_path: Path, capsys):
    """Autocast, an adapter and facts of the model; a folder refuses decodes without autocast."""
    tuned = load_backbone("tiny", lora=LoRASettings(rank=2, targets="all"))
    generator = torch.Generator().manual_seed(0)
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.05, generator=generator)
    save_adapter(tuned, tmp_path / "adapter")
    changed = [f"--model.backbone.init_args.adapter={tmp_path / 'adapter'}"]
    changed.append("--model.backbone.init_args.spec_overrides={forbidden_ids: [7]}")
    run(*command(tmp_path, *changed, "--trainer.precision=bf16-mixed", methods=("threshold_09",)))
    verify = ["traj", "verify", str(tmp_path / "trajectories"), "--level=3", "--backbone=tiny"]
    run(*verify, f"--adapter={tmp_path / 'adapter'}")
    error = fails(capsys, *command(tmp_path, *changed, methods=("threshold_09",)))
    assert "autocast" in error


def test_a_template_may_begin_the_answer(whole: Path, tmp_path: Path, capsys):
    """Two tokens behind each prompt; a folder of prompts without them refuses it."""
    text = "{% set answer_start = 'Tom has' %}{{ question }}"
    start = f"--data.init_args.tasks.init_args.template={text}"
    run(*command(tmp_path, start, count=2))
    plain, begun = (
        {record.uid: record.prompt_ids.tolist() for record in TrajectoryShardReader(folder)}
        for folder in (whole / "trajectories", tmp_path / "trajectories")
    )
    assert len(begun) == 6
    added = load_tokenizer("tiny").encode("Tom has", add_special_tokens=False)
    assert added
    assert all(ids == plain[uid] + added for uid, ids in begun.items())
    assert "template" in fails(capsys, *command(whole, start))


def test_code_runs_only_where_a_configuration_allows_it(tmp_path: Path, capsys):
    told = fails(capsys, *command(tmp_path, "--data.tasks=[{class_path: PythonFunctions}]"))
    assert "set allow_code_execution: true" in told


def test_a_learned_method_that_is_left_out_needs_no_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = ("predict", "--config=exp/benchmark_tiny", f"--run_dir={tmp_path}")
    shipped += (f"--data.tasks={problems(2)}",)
    told = fails(capsys, *shipped, "--data.methods=[entropy,tracelock_095]")
    assert f"policy.path: expected a folder with a trained policy, got none at {tmp_path}" in told
    assert "fit --config" in told
    assert not (tmp_path / "results").exists()
    run(*shipped, "--data.methods=[entropy]")
    assert list(results(tmp_path)) == [("word_problems", "entropy")]
