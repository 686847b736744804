"""``lit-dlm report``: one table and one plot from the results of several runs."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from lit_dlm.reports.plots import plot_front
from lit_dlm.reports.results import write_atomically
from lit_dlm.reports.summary import MethodSummary, summarise_folder, write_summary
from lit_dlm.reports.tables import markdown_tables, terminal_tables


def write_report(summaries: Sequence[MethodSummary], folder: Path, console: Console) -> None:
    """Writes ``summary.json``, ``summary.md`` and ``front.png`` and prints the tables.

    Args:
        summaries: in the order wanted.
        folder: where the files go.
        console: where the tables go.
    """
    write_summary(folder / "summary.json", summaries)
    write_atomically(folder / "summary.md", markdown_tables(summaries))
    plot_front(summaries, folder / "front.png")
    for table in terminal_tables(summaries):
        console.print(table)
    console.print(f"Summary, table and plot: {folder}")


def _method_order(run: Path) -> list[str]:
    """Methods in the order of the run's own summary, which follows its configuration."""
    path = run / "summary.json"
    if not path.exists():
        return []
    return [record["method"] for record in json.loads(path.read_text())]


def main(arguments: Sequence[str]) -> int:
    """Runs the command.

    Args:
        arguments: what follows ``lit-dlm report``.

    Returns:
        The exit status, 0.

    Raises:
        ValueError: a folder holds no results.
    """
    parser = argparse.ArgumentParser(
        prog="lit-dlm report", description="Tables and a speed-quality plot from result folders."
    )
    parser.add_argument("run", nargs="+", type=Path, help="run folder that has a results/ folder")
    parser.add_argument("--out", type=Path, help="where the report goes (default: the first run)")
    options = parser.parse_args(arguments)
    runs: list[tuple[str, list[MethodSummary]]] = []
    for run in options.run:
        found = summarise_folder(run / "results", _method_order(run))
        if not found:
            raise ValueError(f"{run}: expected results in {run / 'results'}, found none")
        runs.append((run.resolve().name, found))
    write_report(merge_runs(runs), options.out or options.run[0], Console())
    return 0


def merge_runs(runs: Sequence[tuple[str, list[MethodSummary]]]) -> list[MethodSummary]:
    """Puts the summaries of several runs into one list, task by task.

    A method that several runs share, such as one decoder on differently trained models, gets the
    name of its run.

    Args:
        runs: name and summaries of each run.

    Returns:
        The summaries; tasks in the order in which they first occur.
    """
    uses = Counter((s.task, s.method) for _, found in runs for s in found)
    merged: dict[str, list[MethodSummary]] = {}
    for run, found in runs:
        methods = {s.method for s in found}
        for summary in found:
            if uses[summary.task, summary.method] > 1:
                label = run if len(methods) == 1 else f"{run}/{summary.method}"
                summary = replace(summary, method=label)
            merged.setdefault(summary.task, []).append(summary)
    return [summary for group in merged.values() for summary in group]
