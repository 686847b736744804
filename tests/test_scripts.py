"""Benchmarks and experiments: scripts outside the packages, which a renamed import would break."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [
    path
    for folder in ("benchmarks", "experiments")
    for path in sorted((ROOT / folder).glob("*.py"))
    if "def main(" in path.read_text()
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_finds_what_it_imports(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(script.parent))
    assert callable(runpy.run_path(str(script), run_name="imported")["main"])


def test_the_stack_compares_fronts_at_equal_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    stack = runpy.run_path(str(ROOT / "experiments" / "stack.py"), run_name="imported")

    def model(low: float, high: float) -> object:
        points = {"05": (low, 6.0), "09": (high, 10.0)}
        correct, forwards = (
            {
                f"{name}_{at}": np.full((2, 5), point[value])
                for name in stack["FAMILIES"]
                for at, point in points.items()
            }
            for value in (0, 1)
        )
        return stack["Model"](correct, forwards, {}, [{"probability_auroc": 0.9}], [])

    models = {
        "base": model(0.2, 0.4),
        "sft": model(0.3, 0.6),
        "rl": model(0.5, 0.6),
        "sft-rl": model(0.6, 0.6),
    }
    report = stack["condense"](models, 10)
    # Half way between 6 and 10 forwards; nothing reaches 12.
    assert report["fronts"]["base"]["threshold"] == [0.3, 0]
    assert report["fronts"]["base"]["threshold_dual"] is None
    assert report["pairs"]["sft + rl"] == {
        "one": [0.15, 0],
        "the other": [0.25, 0],
        "both": [0.3, 0],
        "beyond the sum": [-0.1, 0],
    }
    assert report["pairs"]["sft + tracelock"]["both"] == [0.15, 0]  # families are equal here
