"""Runs of the command line for end-to-end tests."""

import json
import signal
import sys
import tempfile
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from safetensors.torch import load_file

import cli
from lit_dlm.reports.results import ResultFolder, ResultRow
from lit_dlm.trajectories.store import TrajectoryShardReader
from tests.processes import ROOT, fork

SHARED = ROOT.parent / "shared" / "data"
QUIET = ("--trainer.logger=false", "--trainer.enable_progress_bar=false")
ON_ONE_CPU = (
    *("--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.strategy=auto"),
    "--trainer.enable_progress_bar=false",
)
OWN_PAGES = [
    ROOT / "docs" / "start" / "configurations.md",
    *sorted((ROOT / "docs" / "how-to").glob("*own_*.md")),
]
"""Pages whose commands all run in ``test_own_pages.py``."""
RECORD = [
    *("predict", "--config=exp/generate_tiny", "--data.methods=[threshold_07]"),
    *("--model.level=tokens", "--model.projector_dir=null"),
]
"""Decodes into ``traces``."""
ARCHITECTURE = {
    "vocab_size": 462,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_layers": 2,
    "num_heads": 2,
    "mask_id": 2,
    "pad_id": 0,
    "eos_ids": [1],  # ids of the tokenizer tiny
}


def compact(value: object) -> str:
    """A value as an option: JSON without spaces, so that commands can be written as texts."""
    return json.dumps(value, separators=(",", ":"))


def problems(count: int, split: str = "test") -> str:
    """So many word problems, as the option ``tasks``."""
    given = {"split": split, "num_examples": count}
    return compact([{"class_path": "WordProblems", "init_args": given}])


def added(path: str, **options: object) -> str:
    """The option that adds a callback."""
    return f"--trainer.callbacks+={compact({'class_path': path, 'init_args': options})}"


def run(*arguments: str) -> None:
    """Runs the command line in this process."""
    cli.main(list(arguments))


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs the command line, expects it to fail, and returns its one-line error."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as done:
        cli.main(list(arguments))
    assert done.value.code not in (0, None)
    lines = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert len(lines) == 1
    return lines[0]


def start(folder: Path, *arguments: str) -> BaseProcess:
    """Starts the command line in a process of its own, which writes into ``folder``."""
    return fork(folder, _command, arguments)


def _command(arguments: tuple[str, ...]) -> None:
    sys.argv = [str(ROOT / "cli.py"), *arguments]  # Lightning starts other ranks with them
    cli.main()


def killed(
    run_dir: Path,
    *arguments: str,
    before: int,
    files: str,
    num_bytes: int = 1,
    number: int = signal.SIGKILL,
    rank: int = 0,
    status: int = -signal.SIGKILL,
) -> str:
    """Runs a command that gets a signal before a batch, once files of its folder hold that much.

    Returns:
        What was written to the standard error.
    """
    settings = {"batch": before, "folder": str(run_dir), "files": files, "num_bytes": num_bytes}
    settings |= {"number": int(number), "rank": rank}
    with tempfile.TemporaryDirectory() as folder:
        option = added("tests.e2e.killing.KillBefore", **settings)
        process = start(Path(folder), *arguments, option)
        process.join(600)
        told = Path(folder, "err").read_text()
    assert process.exitcode == status, told[-4000:]
    return told


def timeless(rows: list[ResultRow]) -> list[ResultRow]:
    """Rows without their wall time."""
    return [replace(row, seconds=0.0, policy_seconds=0.0) for row in rows]


def results(run_dir: Path) -> dict[tuple[str, str], list[ResultRow]]:
    """All results of a run, without wall times."""
    folder = ResultFolder(run_dir / "results")
    return {pair: timeless(folder.rows(*pair)) for pair in folder.pairs()}


def traces(folder: Path) -> dict[str, tuple[bytes, object, int]]:
    """Digest, grade and number of steps of every trajectory by uid, each of which is there once."""
    records = list(TrajectoryShardReader(folder))
    found = {one.uid: (one.digest(), one.meta.get("correct"), one.num_steps) for one in records}
    assert len(found) == len(records)
    return found


def assert_same_weights(one: Path, other: Path) -> None:
    """Of two files, to the last bit."""
    ours, theirs = load_file(one), load_file(other)
    assert ours.keys() == theirs.keys()
    assert all(theirs[name].equal(value) for name, value in ours.items())


def write_config(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def write_jsonl(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
