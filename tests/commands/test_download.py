"""``lit-dlm download``: what a configuration names, sizes, the fetch. No test asks a hub."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

import cli
from lit_dlm.backbones import resolution

GIGABYTE = 10**9
SIZES = {"Dream-org/Dream-v0-Instruct-7B": [15 * GIGABYTE, 7_000_000], "openai/gsm8k": [5_000_000]}

CONFIG = """
model:
  class_path: DecodeModule
  init_args:
    backbone: {class_path: HFBackbone, init_args: {path: Dream-org/Dream-v0-Instruct-7B}}
    tokenizer: Dream-org/Dream-v0-Instruct-7B
data:
  class_path: PromptDataModule
  init_args:
    tasks:
    - class_path: GSM8K
    - {class_path: PromptsFile, init_args: {path: mine.jsonl}}
    - class_path: WordProblems
"""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, str]]:
    """A hub with two repositories; records what is fetched from it."""
    fetched: list[tuple[str, str]] = []

    def snapshot(repo: str, *, dry_run=False, local_files_only=False, repo_type="model", **options):
        if local_files_only:
            raise LocalEntryNotFoundError("not in the cache")
        if dry_run:
            return [
                SimpleNamespace(
                    filename=str(n), file_size=size, is_cached=n > 0, will_download=n == 0
                )
                for n, size in enumerate(SIZES[repo])
            ]
        fetched.append((repo_type, repo))
        return str(tmp_path)

    class Loaded(list[dict[str, str]]):
        features = None

    def load(source: str, config: str, *, split: str, streaming: bool) -> list[dict[str, str]]:
        if os.environ.get("HF_DATASETS_OFFLINE") == "1":
            raise ConnectionError("offline")
        fetched.append(("dataset", f"{source}/{config}/{split}"))
        return Loaded([{"question": "1+1?", "answer": "#### 2"}])

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "0")  # put back behind the test
    monkeypatch.setattr(resolution, "snapshot_download", snapshot)
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.chdir(tmp_path)
    return fetched


@pytest.fixture
def config(tmp_path: Path) -> str:
    """Dream on GSM8K and on prompts of the user's, which are not there."""
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    try:
        cli.main(["download", *arguments])
    except SystemExit as stop:
        return int(stop.code or 0), capsys.readouterr().out
    return 0, capsys.readouterr().out


def test_sizes_are_told_and_nothing_is_fetched_without_yes(hub, config: str, capsys):
    """15.000 of the model's 15.007 GB are not in the cache yet, and all 5 MB of the data."""
    status, output = run(capsys, "--config", config)
    assert status == 1
    assert "15.01 GB" in output
    assert "5.00 MB" in output
    assert "mine.jsonl: put a .jsonl" in output
    assert "data.init_args.tasks[1].init_args.path" in output
    assert "add --yes" in output
    assert hub == []


def test_yes_fetches_models_whole_and_data_by_their_split(hub, config: str, capsys, tmp_path: Path):
    (tmp_path / "mine.jsonl").write_text("{}\n")
    status, output = run(capsys, "--config", config, "--yes")
    assert (status, hub) == (
        0,
        [("model", "Dream-org/Dream-v0-Instruct-7B"), ("dataset", "openai/gsm8k/main/test")],
    )
    assert "fetched  model" in output


def test_a_full_disk_is_refused_before_anything_is_fetched(hub, config: str, capsys, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=GIGABYTE))
    with pytest.raises(SystemExit):
        cli.main(["download", "--config", config, "--yes"])
    assert "15.01 GB do not fit" in capsys.readouterr().err
    assert hub == []


def test_offline_says_what_to_put_where(hub, config: str, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    status, output = run(capsys, "--config", config)
    assert status == 1
    lines = output.splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["missing", "model", "Dream-org/Dream-v0-Instruct-7B:"],
        ["missing", "data", "openai/gsm8k:"],
        ["missing", "data", "mine.jsonl:"],
    ]
    assert "*.safetensors" in lines[0]
    assert lines[0].endswith("model.init_args.backbone.init_args.path")
    assert hub == []


def test_offline_is_content_with_embedded_models_and_local_files(
    hub, config: str, capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "mine.jsonl").write_text("{}\n")
    status, output = run(
        capsys, "--config", config,
        "--model.init_args.backbone.init_args.path=tiny", "--model.init_args.tokenizer=tiny",
        "--data.init_args.tasks=[{class_path: PromptsFile, init_args: {path: mine.jsonl}}]",
    )  # fmt: skip
    assert status == 0
    assert [line.split() for line in output.splitlines()] == [
        ["here", "model", "tiny"],
        ["here", "data", "mine.jsonl"],
    ]
