"""Programs that attack their grader are worth nothing at any level, and leave nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lit_dlm.grading import SandboxError
from lit_dlm.grading.launch import probe
from tests.grading.hostile import WINS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SYSTEM_PYTHON = "/usr/bin/python3"
"""One that other users may run, which root's own often is not."""


def _run(
    level: str,
    *,
    python: str = sys.executable,
    user: int | None = None,
    prefix: Sequence[str] = (),
) -> Any:
    """What the script says, run as another user if need be."""
    command = [*prefix, python, "-m", "tests.grading.hostile", level]
    if level == "unguarded":
        # Processes, files, network and all else of its own.
        namespaces = ["-U", "-r", "-p", "-f", "-m", "-n", "-i", "--mount-proc", "--kill-child"]
        command = ["unshare", *namespaces, *command]
    result = subprocess.run(
        command,
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        user=user,
        group=user,
        extra_groups=None if user is None else [],
        timeout=600,
    )
    assert result.returncode == 0, result.stderr.decode()
    return json.loads(result.stdout)


def _check(report: dict[str, Any]) -> None:
    assert len(report["results"]) > 120
    right = {
        name: result
        for name, result in report["results"].items()
        if result["status"] == "right" or result["score"]
    }
    assert not right
    assert report["damage"] == []
    assert report["grown_mb"] < 200
    # Held to 2 s; here machines are busy with other tests.
    late = {n: r for n, r in report["results"].items() if r["seconds_over"] > 20}
    assert not late


@pytest.mark.parametrize("level", ["bubblewrap", "namespaces", "landlock"])
def test_nothing_hostile_is_worth_anything_or_leaves_anything(level: Any) -> None:
    try:
        probe(level)
    except SandboxError as error:
        pytest.skip(f"{level}: {error}")
    _check(_run(level))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run it for another user")
@pytest.mark.parametrize(
    ("level", "user", "prefix"),
    [
        ("landlock", None, []),
        ("landlock", 54321, []),
        # As in a container that allows user namespaces alone.
        ("namespaces", None, ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]),
    ],
    ids=["root", "plain user", "root without CAP_SYS_ADMIN"],
)
def test_nor_as_others(level: str, user: int | None, prefix: list[str]) -> None:
    if not all(map(shutil.which, [SYSTEM_PYTHON, *prefix[:1]])):
        pytest.skip("needs the system's Python and setpriv")
    _check(_run(level, python=SYSTEM_PYTHON, user=user, prefix=prefix))


def test_without_walls_the_attacks_win() -> None:
    """But two: x32 calls need a kernel that has them, and exec leaves nobody to tell."""
    if shutil.which("unshare") is None or not os.path.exists("/proc/self/ns/user"):
        pytest.skip("there are no namespaces to try them in")
    won = _run("unguarded")
    assert len(won) >= len(WINS) - 4
    assert {"a signal", "a limit for another process", "reading a file"} <= set(won)
