"""What the quickstart gave when the documents were written, and how its page shows it."""

from __future__ import annotations

import json
from pathlib import Path

from lit_dlm.reports.summary import MethodSummary

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "docs" / "quickstart.json"


def kept_summaries() -> list[MethodSummary]:
    """``summary.json`` of the run whose numbers the documents give."""
    return [MethodSummary(**record) for record in json.loads(KEPT.read_text())]


def table() -> str:
    """That of the page: a row a method, accuracy with its interval and steps of every task."""
    found = {(one.task, one.method): one for one in kept_summaries()}
    tasks = list(dict.fromkeys(task for task, _ in found))
    methods = list(dict.fromkeys(method for _, method in found))
    lines = [f"| method | {' | '.join(f'{task} | steps' for task in tasks)} |"]
    lines.append("|---|" + "---:|---:|" * len(tasks))
    for method in methods:
        cells = []
        for task in tasks:
            one = found[task, method]
            assert one.accuracy is not None
            assert one.interval is not None
            low, high = one.interval
            cells.append(f"{100 * one.accuracy:.1f} % [{100 * low:.0f}, {100 * high:.0f}]")
            cells.append(f"{one.nfe:.1f}")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)
