"""Benchmark decoding through the command line on the embedded model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lit_dlm.backbones.resolution import load_tokenizer
from lit_dlm.grading import isolation_level
from lit_dlm.trajectories.store import TrajectoryShardReader
from tests.e2e.runs import ROOT, fails, finished, killed, results, run, start, write_config

pytestmark = pytest.mark.slow

CONFIG = """
run_dir: {run_dir}
trainer:
  accelerator: cpu
  devices: {devices}
  logger: false
  enable_progress_bar: false
  callbacks:
  - class_path: DecodeWriter
    init_args:
      run_dir: ${{run_dir}}
model:
  class_path: DecodeModule
  init_args:
    backbone: {root}/configs/backbone/tiny.yaml
    tokenizer: tiny
    level: tokens
    decoders:
      random: {root}/configs/decode/random.yaml
      threshold_09: {root}/configs/decode/threshold_09.yaml
      drawn:
        policy: EntropyPolicy
        sampler: {{temperature: 1.0}}
data:
  class_path: PromptDataModule
  init_args:
    tasks:
    - class_path: WordProblems
      init_args: {{split: test, num_examples: {num_examples}}}
    response_length: 32
    batch_size: {batch_size}
"""


def config(
    tmp_path: Path, name: str, *, batch_size: int = 4, devices: int = 1, num_examples: int = 12
) -> str:
    text = CONFIG.format(
        run_dir=tmp_path / name,
        root=ROOT,
        batch_size=batch_size,
        devices=devices,
        num_examples=num_examples,
    )
    return write_config(tmp_path / f"{name}.yaml", text)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One uninterrupted run in batches of 4."""
    folder = tmp_path_factory.mktemp("whole")
    run("predict", "--config", config(folder, "whole"))
    return folder / "whole"


def test_a_run_leaves_results_summary_table_plot_and_its_configuration(whole: Path):
    records = json.loads((whole / "summary.json").read_text())
    assert [(r["task"], r["method"], r["n"]) for r in records] == [
        ("word_problems", "random", 12),
        ("word_problems", "threshold_09", 12),
        ("word_problems", "drawn", 12),
    ]
    assert records[0]["nfe"] == 32.0
    assert records[1]["nfe"] < 32.0
    assert "| random |" in (whole / "summary.md").read_text()
    assert (whole / "front.png").stat().st_size > 10_000
    assert (whole / "predict.yaml").exists()


def assert_every_row_has_its_trajectory(run_dir: Path) -> None:
    """Exactly one record per row, with the digest that the row names."""
    records = list(TrajectoryShardReader(run_dir / "trajectories"))
    digests = {record.uid: record.digest().hex() for record in records}
    assert len(digests) == len(records)
    rows = [row for group in results(run_dir).values() for row in group]
    assert {row.trajectory["uid"]: row.trajectory["digest"] for row in rows} == digests
    assert {row.trajectory["set"] for row in rows} == {"trajectories"}


def test_every_number_can_be_replayed(whole: Path):
    assert_every_row_has_its_trajectory(whole)


def test_the_saved_configuration_runs_again_and_redoes_nothing(whole: Path):
    parts = {p: p.stat().st_mtime_ns for p in whole.rglob("part-*.jsonl")}
    before = results(whole)
    run("predict", "--config", str(whole / "predict.yaml"))
    assert results(whole) == before
    assert {p: p.stat().st_mtime_ns for p in whole.rglob("part-*.jsonl")} == parts


def test_results_of_code_say_what_it_ran_in(tmp_path: Path):
    text = Path(config(tmp_path, "code", num_examples=2)).read_text()
    code = text.replace("WordProblems", "PythonFunctions").replace(
        "num_examples: 2", "num_examples: 2, allow_code_execution: true"
    )
    run("predict", "--config", write_config(tmp_path / "code.yaml", code))
    level = isolation_level()
    for method in ("random", "threshold_09", "drawn"):
        folder = tmp_path / "code/results/python_functions" / method
        assert json.loads((folder / "settings.json").read_text())["isolation"] == level
    assert json.loads((tmp_path / "code/summary.json").read_text())[0]["isolation"] == level
    run("report", str(tmp_path / "code"), "--out", str(tmp_path / "report"))
    page = (tmp_path / "report/report.md").read_text()
    assert f"Code of python_functions ran in {level} when it was graded." in page


def test_batch_size_changes_nothing(whole: Path, tmp_path: Path):
    run("predict", "--config", config(tmp_path, "other", batch_size=8))
    assert results(tmp_path / "other") == results(whole)


@pytest.mark.ddp
def test_more_processes_than_samples_that_are_left_do_what_is_left(whole: Path, tmp_path: Path):
    """Eleven of twelve problems are done; three processes share the last one of each method."""
    run("predict", "--config", config(tmp_path, "three", num_examples=11))
    finished(start("predict", "--config", config(tmp_path, "three", devices=3)))
    assert results(tmp_path / "three") == results(whole)
    assert_every_row_has_its_trajectory(tmp_path / "three")
    owners = {path.name for path in (tmp_path / "three").rglob("part-*.jsonl")}
    assert owners == {"part-r00000.jsonl", "part-r00001.jsonl", "part-r00002.jsonl"}


def test_a_killed_run_resumes_to_the_same_results(whole: Path, tmp_path: Path):
    path = config(tmp_path, "killed", batch_size=1)
    files = "results/word_problems/*/part-*.jsonl"
    killed(tmp_path / "killed", "predict", "--config", path, before=3, files=files)
    done = sum(len(rows) for rows in results(tmp_path / "killed").values())
    assert 0 < done < 36
    run("predict", "--config", path)
    assert results(tmp_path / "killed") == results(whole)
    assert_every_row_has_its_trajectory(tmp_path / "killed")


FULL = ("sequential", "entropy_bounded", "confidence_prefix", "confidence_dual",
        "confidence_horizon_128", "threshold_09_prefix", "threshold_09_dual")  # fmt: skip
BLOCK = ("block_static", "block_dynamic")
BLOCK_MODEL = """
      class_path: HFBackbone
      init_args:
        architecture:
          decoder: qwen3
          vocab_size: 462
          hidden_size: 16
          intermediate_size: 32
          num_layers: 2
          num_heads: 2
          family: sdar
          mask_id: 2          # ids of the embedded tokenizer
          pad_id: 0
          eos_ids: [1]
          attention: block
          block_size: 4
"""


@pytest.mark.parametrize("kind", ["full", "block"])
def test_shipped_decoders_with_caches_run_and_verify(tmp_path: Path, kind: str):
    """A block-attention model decodes with its exact cache, a full one with the approximate ones.

    Every decode is captured, and running it again gives the same steps: the cache is part of the
    decoder that the set describes.
    """
    names = FULL if kind == "full" else BLOCK
    text = Path(config(tmp_path, "cached", num_examples=3)).read_text()
    head, tail = text.split("    decoders:\n")
    decoders = "".join(f"      {n}: {ROOT}/configs/decode/{n}.yaml\n" for n in names)
    text = head + "    decoders:\n" + decoders + "data:" + tail.split("data:")[1]
    if kind == "block":
        text = text.replace(f" {ROOT}/configs/backbone/tiny.yaml\n", BLOCK_MODEL)
    run("predict", "--config", write_config(tmp_path / "cached.yaml", text))
    rows = results(tmp_path / "cached")
    assert {method for _, method in rows} == set(names)
    assert all(len(group) == 3 for group in rows.values())
    assert all(row.nfe > 0 for group in rows.values() for row in group)
    if kind == "full":
        run("traj", "verify", str(tmp_path / "cached" / "trajectories"),
            "--level", "3", "--backbone", "tiny")  # fmt: skip


def test_other_settings_in_the_same_folder_are_refused(whole: Path, capsys):
    error = fails(
        capsys, "predict", "--config", str(whole / "predict.yaml"), "--model.init_args.seed=5"
    )
    assert "seed: 0, now 5" in error


def test_a_template_may_begin_the_answer(whole: Path, tmp_path: Path, capsys):
    """Two tokens behind each prompt; a folder of prompts without them refuses it."""
    text = "{% set answer_start = 'Tom has' %}{{ question }}"
    start = f"--data.init_args.tasks.init_args.template={text}"
    path = config(tmp_path, "begun", num_examples=2)
    run("predict", "--config", path, start)
    plain, begun = (
        {record.uid: record.prompt_ids.tolist() for record in TrajectoryShardReader(folder)}
        for folder in (whole / "trajectories", tmp_path / "begun" / "trajectories")
    )
    assert len(begun) == 6
    added = load_tokenizer("tiny").encode("Tom has", add_special_tokens=False)
    assert added
    assert all(ids == plain[uid] + added for uid, ids in begun.items())
    error = fails(capsys, "predict", "--config", str(whole / "predict.yaml"), start)
    assert "template" in error


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--data.init_args.methods=[randm]", "got 'randm'"),
        (
            "--data.init_args.tasks=[{class_path: PythonFunctions}]",
            "set allow_code_execution: true",
        ),
        ("--data.init_args.tasks=[{class_path: Sudoko}]", "did you mean 'Sudoku'?"),
    ],
)
def test_wrong_settings_give_one_clear_error(tmp_path: Path, capsys, flag: str, message: str):
    assert message in fails(capsys, "predict", "--config", config(tmp_path, "bad"), flag)


def test_a_learned_method_that_is_left_out_needs_no_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_config(
        tmp_path / "own.yaml",
        f"run_dir: {tmp_path / 'run'}\n"
        "data: {init_args: {tasks: [{class_path: WordProblems, "
        "init_args: {split: test, num_examples: 2}}]}}\n",
    )
    shipped = ("predict", "--config", str(ROOT / "configs/exp/benchmark_tiny.yaml"))
    told = fails(capsys, *shipped, "--config", file, "--data.methods", "[entropy,tracelock_095]")
    assert f"acceptance policy folder {tmp_path / 'run' / 'policy'}: config.json is missing" in told
    assert not (tmp_path / "run" / "results").exists()
    run(*shipped, "--config", file, "--data.methods", "[entropy]")
    assert list(results(tmp_path / "run")) == [("word_problems", "entropy")]
