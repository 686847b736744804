import os
import signal
import subprocess
import sys
from pathlib import Path

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


def holder(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.slow
def test_a_folder_is_held_by_one_process_until_it_dies(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    process = holder(tmp_path)
    try:
        told = rf"{tmp_path}: is in use by process {process.pid} on {os.uname().nodename} since 20"
        with pytest.raises(ValueError, match=told), locked(tmp_path, "fit"):
            pass
        with locked(tmp_path, "predict"):
            pass
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with locked(tmp_path, "fit"):
        assert f"going on after process {process.pid}" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_without_locks_of_the_file_system_the_owner_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
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
def test_the_command_line_refuses_a_run_folder_in_use_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for name in ("traces", "projector"):
        (tmp_path / name).mkdir()
    process = holder(tmp_path)
    try:
        told = fails(capsys, "fit", "--config", "exp/tracelock_tiny", "--run_dir", str(tmp_path))
    finally:
        process.kill()
        process.wait()
    assert f"{tmp_path}: is in use by process {process.pid} on" in told
    assert {path.name for path in tmp_path.iterdir()} == {".fit.lock", "traces", "projector"}
