"""``lit-dlm download``: what a configuration names, sizes, the fetch. No test asks a hub."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

import cli
from lit_dlm.backbones import location
from lit_dlm.commands.download import sources

GIGABYTE = 10**9
DREAM = "Dream-org/Dream-v0-Instruct-7B"
SIZES = {DREAM: [15 * GIGABYTE, 7_000_000], "openai/gsm8k": [5_000_000]}

MINE = "{class_path: PromptsFile, init_args: {path: mine.jsonl}}"
CONFIG = f"""
model:
  class_path: DecodeModule
  init_args:
    backbone: {{class_path: HFBackbone, init_args: {{path: {DREAM}}}}}
    tokenizer: {DREAM}
data:
  class_path: PromptDataModule
  init_args:
    tasks: [{{class_path: GSM8K}}, {MINE}, {{class_path: WordProblems}}]
"""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, str]]:
    """A hub with two repositories; records what is fetched from it."""
    fetched: list[tuple[str, str]] = []

    def snapshot(repo: str, *, dry_run=False, local_files_only=False, repo_type="model", **options):
        if local_files_only and (tmp_path / "cache").is_dir():
            return str(tmp_path / "cache")
        if local_files_only:
            raise LocalEntryNotFoundError("not in the cache")
        if dry_run:
            cached = [{"is_cached": n > 0, "will_download": n == 0} for n in range(2)]
            files = zip(SIZES[repo], cached, strict=False)
            return [SimpleNamespace(filename="x", file_size=size, **on) for size, on in files]
        fetched.append((repo_type, repo))
        return str(tmp_path)

    def load(source: str, config: str, *, split: str) -> datasets.Dataset:
        if os.environ.get("HF_DATASETS_OFFLINE") == "1":
            raise ConnectionError("offline")
        fetched.append(("dataset", f"{source}/{config}/{split}"))
        return datasets.Dataset.from_list([{"question": "1+1?", "answer": "#### 2"}])

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "0")  # put back behind the test
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: None)  # it answers
    monkeypatch.setattr(location, "snapshot_download", snapshot)
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.chdir(tmp_path)
    return fetched


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Downloads for Dream on GSM8K and on prompts of the user's, which are not there."""

    def download(*arguments: str) -> tuple[int, str, str]:
        (tmp_path / "config.yaml").write_text(CONFIG)
        status = 0
        try:
            cli.main(["download", "--config", "config.yaml", *arguments])
        except SystemExit as stop:
            status = int(stop.code or 0)
        return status, *capsys.readouterr()

    return download


def test_sizes_are_told_and_yes_fetches_models_whole_and_data_by_their_split(hub, run, tmp_path):
    """15.000 of the model's 15.007 GB are not in the cache yet, and all 5 MB of the data."""
    status, output, _ = run()
    assert (status, hub) == (1, [])
    for told in (
        *("15.01 GB", "5.00 MB", "add --yes", "mine.jsonl: put a .jsonl"),
        "data.init_args.tasks[1].init_args.path",
    ):
        assert told in output
    (tmp_path / "mine.jsonl").write_text("{}\n")
    status, output, _ = run("--yes")
    fetched = [("model", DREAM), ("dataset", "openai/gsm8k/main/test")]
    assert (status, hub) == (0, fetched)
    assert "fetched  model" in output


def test_a_policy_of_the_hub_counts_and_what_the_run_makes_does_not():
    kind = "lit_dlm.tracelock.policy.TraceLockPolicy"
    paths = ["me/policy", "out/policy", "runs/other/policy"]
    decoders = [{"class_path": kind, "init_args": {"path": path}} for path in paths]
    found = sources({"run_dir": "out", "decoders": decoders})
    assert [(one.kind, one.name) for one in found] == [("policy", "me/policy")]


def test_training_data_and_worked_examples_count_too():
    of = {"class_path": "lit_dlm.datamodules.ResponsesFile", "init_args": {"path": "me/answers"}}
    shots = {"path": "me/problems", "split": "test", "num_shots": 4}
    tasks = [{"class_path": "lit_dlm.tasks.GSM8K", "init_args": shots}]
    found = sources({"sources": [of], "tasks": tasks})
    assert [(one.name, one.split) for one in found] == [
        ("me/answers", None),
        ("me/problems", "test"),
        ("me/problems", "train"),
    ]


def test_what_reads_pictures_is_fetched_with_the_model():
    options = {"path": "me/model", "vision": {"train": "none", "path": "me/pictures"}}
    found = sources(
        {"backbone": {"class_path": "lit_dlm.backbones.HFBackbone", "init_args": options}}
    )
    assert [(one.kind, one.name, one.option) for one in found] == [
        ("model", "me/model", "backbone.init_args.path"),
        ("model", "me/pictures", "backbone.init_args.vision.path"),
    ]


def test_a_full_disk_is_refused_before_anything_is_fetched(hub, run, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=GIGABYTE))
    status, _, error = run("--yes")
    assert "15.01 GB do not fit" in error
    assert (status != 0, hub) == (True, [])


def test_offline_says_what_to_put_where_and_is_content_with_local_files(
    hub, run, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    status, output, _ = run()
    lines = output.splitlines()
    assert (status, [line.split()[1:3] for line in lines]) == (
        1,
        [["model", f"{DREAM}:"], ["data", "openai/gsm8k:"], ["data", "mine.jsonl:"]],
    )
    assert all(line.startswith("missing ") for line in lines)
    assert "*.safetensors" in lines[0]
    assert lines[0].endswith("model.init_args.backbone.init_args.path")
    assert hub == []
    (tmp_path / "cache").mkdir()
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "cache" / "model.safetensors.index.json").write_text(json.dumps(index))
    for number, mark in ((1, "missing"), (2, "here")):  # with one of its files a model is not here
        (tmp_path / "cache" / f"model-{number}.safetensors").touch()
        assert run()[1].startswith(f"{mark:8} model ")
    (tmp_path / "mine.jsonl").write_text("{}\n")
    status, output, _ = run(
        "--model.init_args.backbone.init_args.path=tiny", "--model.init_args.tokenizer=tiny",
        f"--data.init_args.tasks=[{MINE}]",
    )  # fmt: skip
    assert (status, output.split()) == (0, ["here", "model", "tiny", "here", "data", "mine.jsonl"])
