"""The reduced form of ``make faults``: two cases of its table, of smaller jobs."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT
from tests.processes import fork

CASES = ("generate:grader killed", "fit:loader worker killed")


def _faults(out: Path) -> None:
    sys.path.insert(0, str(ROOT / "experiments"))
    import faults

    for name, job in faults.JOBS.items():
        text = json.dumps(job.command).replace("num_examples: 16", "num_examples: 4")
        faults.JOBS[name] = replace(job, command=json.loads(text.replace("=60", "=20")))
    sys.argv = ["faults.py", "--times", "1", "--out", str(out), "--only", *CASES]
    faults.main()


@pytest.mark.slow
def test_nothing_is_lost_doubled_or_changed_by_a_fault(tmp_path: Path) -> None:
    fork(tmp_path / "log", _faults, tmp_path).join()
    cases = [json.loads(line) for line in (tmp_path / "cases.jsonl").read_text().splitlines()]
    hits = [case for case in cases if case["hit"]]
    assert sorted(f"{case['job']}:{case['fault']}" for case in hits) == sorted(CASES)
    assert all(case["survived"] and not case["unclear"] for case in cases), cases
    table = (tmp_path / "table.md").read_text().partition("\n\n")[0]
    assert len(table.splitlines()) == 2 + len(CASES)
