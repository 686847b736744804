"""What the quickstart gave when the documents were written, and how its page shows it."""

import json
from pathlib import Path

from lit_dlm.reports.summary import MethodSummary

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "docs" / "start" / "quickstart" / "quickstart.json"


def kept_summaries() -> list[MethodSummary]:
    """``summary.json`` of the run whose numbers the documents give."""
    return [MethodSummary(**record) for record in json.loads(KEPT.read_text())]


def table() -> str:
    """That of the page: a row a method, accuracy with its interval and steps of every task."""
    tasks = list(dict.fromkeys(one.task for one in kept_summaries()))
    rows: dict[str, list[str]] = {}
    for one in kept_summaries():
        low, high = one.interval
        told = f"{100 * one.accuracy:.1f} % [{100 * low:.0f}, {100 * high:.0f}] | {one.nfe:.1f}"
        rows.setdefault(one.method, []).append(told)
    head = [f"| method | {' | '.join(f'{task} | steps' for task in tasks)} |"]
    head.append("|---|" + "---:|---:|" * len(tasks))
    return "\n".join(head + [f"| {name} | {' | '.join(told)} |" for name, told in rows.items()])
