"""The reduced form of ``make faults``: one fault of each kind in each job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT


@pytest.mark.slow
def test_nothing_is_lost_or_doubled_by_one_fault_of_each_kind(tmp_path: Path) -> None:
    out = tmp_path / "faults"
    script = ROOT / "experiments" / "faults.py"
    subprocess.run(
        [sys.executable, str(script), "--times", "1", "--seed", "1", "--out", str(out)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=600,
    )
    rows = json.loads((out / "faults.json").read_text())["rows"]
    assert len(rows) == 12
    for row in rows:
        _, _, _, times, survived, lost, more, _ = (cell.strip() for cell in row.split("|"))
        assert (times, survived, lost, more) == ("1", "1", "0", "0"), row
