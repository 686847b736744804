"""The GPU checks at small sizes, wherever the tests run."""

import math
from pathlib import Path

import pytest
import torch

from lit_dlm.decoding import Canvas
from tests.benchmarks.conftest import run_script
from tests.graphs import emulated


@pytest.mark.slow
def test_the_smoke_run_passes(tmp_path: Path) -> None:
    """In a process of its own: FSDP2 leaves variables and threads that others would meet."""
    lines = run_script(tmp_path, "gpu.py", "--smoke").splitlines()
    assert lines[-1] == "failed: nothing"
    assert not [line for line in lines if "FAIL" in line]
    assert sum(line.startswith("PASS") for line in lines) >= 24
    assert any(line.startswith("INFO  the same: x time to multiply") for line in lines)


@pytest.mark.slow
def test_emulated_graphs_pass_their_checks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a GPU is asked, of an emulator: recorded steps, equal tokens, one line, merges."""
    import gpu

    with emulated(monkeypatch):
        checks = gpu.Checks(smoke=True)
        checks.graphs()
        checks.speed()
    lines = capsys.readouterr().out.splitlines()
    assert not checks.failed
    recorded = [line for line in lines if "share of steps without a graph" in line]
    assert [line[:4] for line in recorded] == ["PASS"] * 3
    assert sum(line.startswith("PASS") for line in lines) >= 11
    assert min(int(line.split()[-1]) for line in lines if "the same: graphs: " in line) >= 1


def test_rows_apart_are_in_different_places_of_their_first_block() -> None:
    """Seven cells further than the row before, of blocks of eight; nothing else changes."""
    import gpu

    ids = torch.full((4, 20), 3)
    ids[:, :4] = 50
    canvas = Canvas(ids=ids, editable=ids == 3, seeds=torch.arange(4), start=4)
    apart = gpu.Checks(smoke=True).apart(canvas, 8)
    assert (~apart.editable).sum(1).tolist() == [4 + ahead for ahead in (0, 7, 6, 5)]
    assert apart.ids[:, 4:].ne(3).equal(~apart.editable[:, 4:])
    assert apart.ids[:, :4].equal(ids[:, :4])


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
