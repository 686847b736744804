"""The GPU checks at small sizes, wherever the tests run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))


@pytest.mark.slow
def test_the_smoke_run_passes(capsys: pytest.CaptureFixture[str]) -> None:
    import gpu

    with pytest.raises(SystemExit) as done:
        gpu.main(["--smoke"])
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if "FAIL" in line]
    assert done.value.code == 0
    assert lines[-1] == "failed: nothing"
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
