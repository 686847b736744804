"""The script of released sizes, on a small twin."""

import subprocess
from functools import partial
from pathlib import Path

import pytest

from tests import twins


@pytest.mark.slow
def test_a_run_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks of 32 cells in 4 steps each; Dream's caches give a refresh a step of its own."""
    import real_size

    monkeypatch.setattr(twins, "write_twin", partial(twins.write_twin, num_ordinary=2000))
    decode = {"decode": real_size.RUNS["dream-7b"]["decode"]}
    monkeypatch.setitem(real_size.RUNS, "dream-7b", decode)
    real_size.measure(tmp_path, "dream-7b", accelerator="cpu", small=True)
    found = real_size.results(tmp_path)
    phases = {phase["phase"]: phase for phase in found["dream-7b/decode"]}
    weights = phases["load"]["weights"]
    assert weights == 2 * (2 * (152064 - 151643 + 2000) * 64 + 2 * _layer(64) + 64)
    assert all(phase["peak"] > weights for name, phase in phases.items() if "peak" in phase)
    forwards = {
        name: {width: times for (_, width), times in phases[name]["forwards"]}
        for name in ("none", "prefix", "dual")
    }
    length = max(forwards["none"])
    assert forwards == {
        "none": {length: 8},
        "prefix": {length: 2, 64: 4, 32: 4},
        "dual": {length: 2, 32: 8},
    }
    assert all(phases[name]["ratio"] > 0 for name in forwards)
    assert 0 < phases["two layers"]["error"] < 0.03

    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it ran again"))
    real_size.measure(tmp_path, "dream-7b", accelerator="cpu", small=True)
    assert real_size.results(tmp_path) == found
    table = real_size.markdown(found, ["dream-7b"])
    assert f"| dream-7b | decode | dual | {phases['dual']['seconds']:.1f} |" in table


def _layer(width: int) -> int:
    """Weights of a layer: 4 heads, 2 for keys and values with biases, a feed-forward of twice."""
    attention = 2 * width * width + 2 * width * width // 2 + 2 * width
    return attention + 3 * width * 2 * width + 2 * width
