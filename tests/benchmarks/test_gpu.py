"""The GPU checks at small sizes, wherever the tests run."""

import math
from pathlib import Path

import pytest

from tests.benchmarks.conftest import run_script


@pytest.mark.slow
def test_the_smoke_run_passes(tmp_path: Path) -> None:
    """In a process of its own: FSDP2 leaves variables and threads that others would meet."""
    lines = run_script(tmp_path, "gpu.py", "--smoke").splitlines()
    assert lines[-1] == "failed: nothing"
    assert not [line for line in lines if "FAIL" in line]
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
