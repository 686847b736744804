"""Programs that attack their grader are worth nothing at any level, and leave nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.grading.hostile import SETUPS, WINS, run_setup, scored

pytestmark = pytest.mark.slow


FIRST = {method: name for name, (method, _) in reversed(SETUPS.items())}
"""Where all are graded: who runs a level matters to those that attack its walls."""


@pytest.mark.parametrize("setup", SETUPS)
def test_nothing_hostile_is_worth_anything_or_leaves_anything(setup: str) -> None:
    walls_only = setup not in FIRST.values()
    report = run_setup(setup, walls_only=walls_only)
    if isinstance(report, str):
        pytest.skip(report)
    assert len(report["results"]) > (120 if walls_only else 170)
    assert not scored(report)
    assert report["damage"] == []
    assert report["beside"] == ["right"] * 4
    assert report["grown_mb"] < 200
    # Held to 2 s; here machines are busy with other tests.
    assert not {n: r for n, r in report["results"].items() if r["seconds_over"] > 20}


def test_without_walls_the_attacks_win() -> None:
    """But some: a kernel may lack what they ask for, and exec leaves nobody to tell."""
    if shutil.which("unshare") is None or not os.path.exists("/proc/self/ns/user"):
        pytest.skip("there are no namespaces to try them in")
    # Processes, files, network and all else of its own.
    namespaces = ["-U", "-r", "-p", "-f", "-m", "-n", "-i", "--mount-proc", "--kill-child"]
    told = subprocess.run(
        ["unshare", *namespaces, sys.executable, "-m", "tests.grading.hostile", "unguarded"],
        capture_output=True,
        timeout=600,
        check=True,
    )
    won = json.loads(told.stdout)
    assert len(won) >= len(WINS) - 6
    assert {"a signal", "a signal by a pipe", "a limit for another process"} <= set(won)
    assert {"reading a file", "shared memory of others", "a datagram from a pair"} <= set(won)
