"""The GPU checks at small sizes, wherever the tests run."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))


@pytest.mark.slow
def test_the_smoke_run_passes() -> None:
    """In a process of its own: FSDP2 leaves variables and threads that others would meet."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, root / "benchmarks" / "gpu.py", "--smoke"],
        cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert not [line for line in lines if "FAIL" in line]
    assert (done.returncode, lines[-1]) == (0, "failed: nothing"), done.stderr[-2000:]
    assert sum(line.startswith("PASS") for line in lines) >= 16
    assert any(line.startswith("INFO  the same: x time to multiply") for line in lines)


def test_a_number_beyond_its_limit_fails_and_an_unknown_one_does_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import gpu

    checks = gpu.Checks(smoke=False)
    capsys.readouterr()
    checks.tell("error", 0.02, most=0.01)
    checks.tell("time", 3.0, most=2.0, is_time=True)
    checks.tell("unknown chip", math.nan, most=2.0, is_time=True)
    assert checks.failed == ["error", "time"]
    gpu.Checks(smoke=True).tell("time", 3.0, most=2.0, is_time=True)
    out = capsys.readouterr().out.splitlines()
    assert [line[:4] for line in out] == ["FAIL", "FAIL", "INFO", "INFO", "INFO"]
