"""The reduced form of ``make faults``: three cases of its table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT

CASES = ("generate:grader killed", "fit:loader worker killed", "benchmark:file limit")


@pytest.mark.slow
def test_nothing_is_lost_doubled_or_changed_by_a_fault(tmp_path: Path) -> None:
    out = tmp_path / "faults"
    script = ROOT / "experiments" / "faults.py"
    subprocess.run(
        [sys.executable, str(script), "--times", "1", "--out", str(out), "--only", *CASES],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=600,
    )
    cases = [json.loads(line) for line in (out / "cases.jsonl").read_text().splitlines()]
    hits = [case for case in cases if case["hit"]]
    assert sorted(f"{case['job']}:{case['fault']}" for case in hits) == sorted(CASES)
    assert all(case["survived"] and not case["unclear"] for case in cases), cases
    assert len((out / "table.md").read_text().partition("\n\n")[0].splitlines()) == 2 + len(CASES)
