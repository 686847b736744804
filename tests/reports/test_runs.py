"""The list of runs: what is told of whole, running, interrupted and broken folders."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lit_dlm.reports.runs import main
from tests.processes import ROOT

SAVED = """
model:
  class_path: lit_dlm.finetuning.sft.SFTModule
  init_args: {tokenizer: tiny}
"""
METRICS = "epoch,step,train/loss,val/accuracy\n0,1,2.0,\n0,1,,0.5\n0,2,1.0,\n0,2,,0.25\n"


def saved(folder: Path, command: str = "fit", *, state: str = "", at: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{command}.yaml"
    path.write_text(SAVED)
    os.utime(path, (at, at))
    if state:
        (folder / f".{command}.state").write_text(state)
    return path


def listed(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> dict[str, list[str]]:
    """Cells by run, in the order of the table."""
    monkeypatch.setenv("COLUMNS", "200")
    assert main([str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if "│" in line]
    return {name: cells for name, *cells in rows}


def test_runs_are_listed_by_when_they_began_with_their_best_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best of a validation counts more than a loss; tasks have that of their best method."""
    logs = saved(tmp_path / "b" / "fit", state="done", at=2).parent / "logs" / "version_0"
    logs.mkdir(parents=True)
    (logs / "metrics.csv").write_text(METRICS)
    pairs = [("sums", 0.25), ("sums", 0.5), ("words", 0.75), ("drawn", None)]
    records = [{"task": task, "accuracy": accuracy} for task, accuracy in pairs]
    bench = saved(tmp_path / "a", "predict", state="done", at=1).parent
    (bench / "summary.json").write_text(json.dumps(records))
    (tmp_path / "nothing").mkdir()
    found = listed(tmp_path, capsys, monkeypatch)
    assert list(found) == ["a", "b/fit"]
    told = ["predict SFT, tiny", "done", "sums 50.0 %, words 75.0 %"]
    assert found["a"][:3] == told
    assert found["b/fit"][:3] == ["fit SFT, tiny", "done", "val/accuracy 0.5"]
    assert found["a"][3].startswith(("1970-01-01", "1969-12-31"))


def test_a_run_is_running_while_its_process_lives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock of a run folder counts for its parts; a killed process leaves the file."""
    saved(tmp_path / "run" / "part", state="begun")
    code = (
        "import sys, time; from pathlib import Path; from lit_dlm.system.locks import locked\n"
        "with locked(Path(sys.argv[1]), 'fit'):\n    print('held', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert listed(tmp_path, capsys, monkeypatch)["run/part"][1] == "running"
        process.kill()
    assert (tmp_path / "run" / ".fit.lock").exists()
    assert listed(tmp_path, capsys, monkeypatch)["run/part"][1] == "interrupted"


def test_broken_files_are_told_and_hide_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, text in enumerate(("model: [", "model: 3", "", "\x00", "model: {init_args: 1}")):
        path = saved(tmp_path / f"yaml{number}", "predict", state="done")
        path.write_text(text)
        (path.parent / "summary.json").write_text("[{")
    logs = saved(tmp_path / "logs").parent / "logs"
    logs.mkdir()
    (logs / "metrics.csv").write_bytes(b"step,train/loss\nx,1\n")
    saved(tmp_path / "whole")
    found = listed(tmp_path, capsys, monkeypatch)
    for number in range(5):
        assert found[f"yaml{number}"][:3] == ["unreadable", "done", "unreadable"]
    assert found["logs"][:3] == ["fit SFT, tiny", "-", "unreadable"]
    assert found["whole"][:3] == ["fit SFT, tiny", "-", "-"]
    with pytest.raises(ValueError, match="nowhere: expected a folder that holds runs, found none"):
        main([str(tmp_path / "nowhere")])
