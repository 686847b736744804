"""Benchmarks and experiments: scripts outside the packages, which a renamed import would break."""

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_dlm.reports.results import ResultFolder
from tests.reports.rows import row

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [
    path
    for folder in ("benchmarks", "experiments")
    for path in sorted((ROOT / folder).glob("*.py"))
    if "def main(" in path.read_text()
]


def imported(script: str | Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    path = ROOT / script
    monkeypatch.syspath_prepend(str(path.parent))
    return runpy.run_path(str(path), run_name="imported")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_finds_what_it_imports(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(imported(script, monkeypatch)["main"])


def test_the_stack_compares_fronts_at_equal_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = imported("experiments/stack.py", monkeypatch)

    def model(low: float, high: float) -> object:
        points = {
            f"{name}_{at}": point
            for name in stack["FAMILIES"]
            for at, point in {"05": (low, 6.0), "09": (high, 10.0)}.items()
        }
        correct, forwards = (
            {name: np.full((2, 5), point[value]) for name, point in points.items()}
            for value in (0, 1)
        )
        return stack["Model"](correct, forwards, {}, [{"probability_auroc": 0.9}], [])

    correct = {"base": (0.2, 0.4), "sft": (0.3, 0.6), "rl": (0.5, 0.6), "sft-rl": (0.6, 0.6)}
    report = stack["condense"]({name: model(*ends) for name, ends in correct.items()}, 10)
    # Half way between 6 and 10 forwards; nothing reaches 12.
    assert report["fronts"]["base"]["threshold"] == [0.3, 0]
    assert report["fronts"]["base"]["threshold_dual"] is None
    pair = {"one": 0.15, "the other": 0.25, "both": 0.3, "beyond the sum": -0.1}
    assert report["pairs"]["sft + rl"] == {name: [gain, 0] for name, gain in pair.items()}
    assert report["pairs"]["sft + tracelock"]["both"] == [0.15, 0]  # families are equal here


def test_arms_of_decode_states_are_compared_by_problem_and_at_equal_forwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = imported("experiments/decode_states.py", monkeypatch)
    setting = script["Setting"]("tiny", "WordProblems", 8, ("entropy_1", "entropy_2"), 1)
    verdicts = {  # arm, method -> forwards, and what is right in each seed
        ("decode", "entropy_1"): (8, ["1110", "1100"]),
        ("random", "entropy_1"): (8, ["1000", "1100"]),
        ("decode", "threshold_06"): (6, ["1100", "1100"]),
        ("random", "threshold_06"): (4, ["0000", "0000"]),
        ("random", "threshold_09"): (8, ["1111", "1111"]),
    }
    arms: dict[str, list[Path]] = {"decode": [], "random": []}
    for arm, folders in arms.items():
        for seed in (0, 1):
            folder = ResultFolder(tmp_path / f"{arm}-{seed}")
            folders.append(folder.folder)
            for method in setting.methods:
                others = 4 if method.endswith("_06") else 8, ["1010", "1010"]
                forwards, right = verdicts.get((arm, method), others)
                folder.claim("t", method, {})
                folder.append(
                    row(str(uid), method=method, correct=digit == "1", nfe=forwards)
                    for uid, digit in enumerate(right[seed])
                )

    report = script["compare"](setting, arms["decode"], arms["random"])

    first = report["entropy_1"]
    assert first["accuracy"] == {"decode": [0.75, 0.5], "random": [0.25, 0.5]}
    # By problem 0, 0.5, 0.5, 0; by seed 0.5 and 0.
    assert first["difference"] == pytest.approx(
        {"mean": 0.25, "stderr_problems": 1 / 48**0.5, "stderr_seeds": 0.25}
    )
    assert report["judged"]["mean"] == pytest.approx(0.125)  # entropy_2 is equal in both
    assert report["threshold_06"]["difference"]["mean"] == pytest.approx(0.5)
    # Six forwards lie half way between none right at four and all right at eight.
    assert report["threshold_06"]["equal_forwards"] == pytest.approx(
        {"mean": 0.0, "stderr_problems": 1 / 12**0.5, "stderr_seeds": 0.0}
    )
    assert report["threshold_06"]["forwards"] == {"decode": 6, "random": 4}
