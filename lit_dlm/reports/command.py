"""``lit-dlm report``: tables, a plot and a page from the results of several runs."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from lit_dlm.reports.page import ReportedRun, write_pages
from lit_dlm.reports.summary import MethodSummary, summarise_run, write_report


def main(arguments: Sequence[str]) -> int:
    """Runs the command on what follows its name; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="lit-dlm report",
        description="Tables, a speed-quality plot, and a page with failures first that links to "
        "the traces.",
    )
    parser.add_argument("run", nargs="+", type=Path, help="run folder that has a results/ folder")
    parser.add_argument("--out", type=Path, help="where the report goes (default: the first run)")
    options = parser.parse_args(arguments)
    runs = labelled([(run, summarise_run(run)) for run in options.run])
    folder, console, merged = options.out or options.run[0], Console(), merge_runs(runs)
    write_report(merged, folder, console)
    title = f"Report of {', '.join(run.name for run in runs)}"
    pages = write_pages(runs, merged, folder, title=title)
    console.print(f"Pages: {', '.join(pages)}")
    return 0


def labelled(runs: Sequence[tuple[Path, list[MethodSummary]]]) -> list[ReportedRun]:
    """Runs with the names of their methods in common tables.

    A method that several runs share, such as one decoder on differently trained models, gets the
    name of its run.
    """
    uses = Counter((one.task, one.method) for _, found in runs for one in found)
    reported = []
    for folder, found in runs:
        run, is_alone = folder.resolve().name, len({one.method for one in found}) == 1
        labels = {
            (one.task, one.method): one.method
            if uses[one.task, one.method] == 1
            else run
            if is_alone
            else f"{run}/{one.method}"
            for one in found
        }
        reported.append(ReportedRun(folder=folder, summaries=found, labels=labels))
    return reported


def merge_runs(runs: Sequence[ReportedRun]) -> list[MethodSummary]:
    """The summaries of several runs under their names in common tables, task by task."""
    merged: dict[str, list[MethodSummary]] = {}
    for run in runs:
        for one in run.summaries:
            label = run.labels[one.task, one.method]
            merged.setdefault(one.task, []).append(replace(one, method=label))
    return [summary for group in merged.values() for summary in group]
