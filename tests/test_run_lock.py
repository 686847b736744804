import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from lit_dlm.commands.trainer import locked
from tests.e2e.runs import fails

HOLD = """
import sys, time
from pathlib import Path
from lit_dlm.commands.trainer import locked
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
        assert f"going on after process {process.pid}" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_without_locks_of_the_file_system_the_owner_is_asked_for(tmp_path: Path, monkeypatch):
    """A dead process of this host gives way; one of another host may live."""
    monkeypatch.setattr("lit_dlm.commands.trainer.lock", lambda file: None)
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
    monkeypatch.setattr("lit_dlm.commands.trainer.os.pwrite", full)
    with pytest.raises(ValueError, match=r"^run_dir: .* \(No space"), locked(tmp_path / "d", "fit"):
        pass
    assert not list((tmp_path / "d").iterdir())
