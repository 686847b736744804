import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from lit_dlm.reports.results import ResultFolder
from lit_dlm.system.files import write_atomically
from lit_dlm.system.locks import locked
from lit_dlm.training.checkpoint import CheckpointFiles
from tests.e2e.runs import fails
from tests.reports.rows import row

HOLD = """
import sys, time
from pathlib import Path
from lit_dlm.system.locks import locked
with locked(Path(sys.argv[1]), "fit"):
    print("held", flush=True)
    time.sleep(60)
"""


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a folder; killed behind the block."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_a_folder_is_held_by_one_process_until_it_dies(tmp_path: Path, caplog):
    with holder(tmp_path) as process:
        told = rf"{tmp_path}: is in use by process {process.pid} on {os.uname().nodename} since 20"
        with pytest.raises(ValueError, match=told), locked(tmp_path, "fit"):
            pass
        with locked(tmp_path, "predict"):
            pass
    with locked(tmp_path, "fit"):
        assert f"resuming after process {process.pid}" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_without_locks_of_the_file_system_the_owner_is_asked_for(tmp_path: Path, monkeypatch):
    """A dead process of this host gives way; one of another host may live."""
    monkeypatch.setattr("lit_dlm.system.locks.lock", lambda file: None)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    path = tmp_path / ".fit.lock"
    text = '{{"pid": {}, "host": "{}", "since": "then", "command": "lit-dlm fit"}}'
    path.write_text(text.format(dead.pid, os.uname().nodename))
    with locked(tmp_path, "fit"):
        pass
    told = r"since then .*delete .*\.lock if that process is dead"
    for owner in (text.format(os.getpid(), os.uname().nodename), text.format(1, "elsewhere")):
        path.write_text(owner)
        with pytest.raises(ValueError, match=told), locked(tmp_path, "fit"):
            pass


def test_what_is_written_into_a_folder_that_others_prepared_stays_there(tmp_path: Path):
    """Links in place of the lock, of results, of a checkpoint's draft, and of one beside a file."""
    mine, folder = tmp_path / "mine", tmp_path / "run"
    part = folder / "results/t/m/part-r00000.jsonl"
    part.parent.mkdir(parents=True)
    mine.write_text("kept\n")
    names = (".fit.lock", ".last.ckpt-partial", f"fit.yaml.tmp-{os.getpid()}", "fit.yaml")
    for path in (part, *(folder / name for name in names)):
        path.symlink_to(mine)
    with pytest.raises(ValueError, match=r"^run_dir: .*symbolic links"), locked(folder, "fit"):
        pass
    with pytest.raises(OSError, match=r"symbolic link: .*part-r00000\.jsonl"):
        ResultFolder(folder / "results").append([row()])
    write_atomically(folder / "fit.yaml", "new")
    CheckpointFiles().save_checkpoint({"loops": {}}, folder / "last.ckpt")
    assert (mine.read_text(), (folder / "fit.yaml").read_text()) == ("kept\n", "new")


@pytest.mark.slow
def test_the_command_line_refuses_a_run_folder_in_use_before_any_work(tmp_path: Path, capsys):
    for name in ("traces", "projector"):
        (tmp_path / name).mkdir()
    with holder(tmp_path) as process:
        told = fails(capsys, "fit", "--config", "exp/tracelock_tiny", "--run_dir", str(tmp_path))
    assert f"{tmp_path}: is in use by process {process.pid} on" in told
    assert {path.name for path in tmp_path.iterdir()} == {".fit.lock", "traces", "projector"}


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path, monkeypatch):
    """A file, a read-only place, a full disk; of the last no lock is left behind."""
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", Path("/proc/nowhere")):
        with pytest.raises(ValueError, match=f"^run_dir: {folder} cannot"), locked(folder, "fit"):
            pass
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr("lit_dlm.system.locks.os.pwrite", full)
    with pytest.raises(ValueError, match=r"^run_dir: .* \(No space"), locked(tmp_path / "d", "fit"):
        pass
    assert not list((tmp_path / "d").iterdir())
