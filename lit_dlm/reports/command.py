"""``lit-dlm report``: one table and one plot from the results of several runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
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


def main(arguments: Sequence[str]) -> None:
    """Runs the command.

    Args:
        arguments: what follows ``lit-dlm report``.

    Raises:
        ValueError: a folder holds no results.
    """
    parser = argparse.ArgumentParser(
        prog="lit-dlm report", description="Tables and a speed-quality plot from result folders."
    )
    parser.add_argument("run", nargs="+", type=Path, help="run folder that has a results/ folder")
    parser.add_argument("--out", type=Path, help="where the report goes (default: the first run)")
    options = parser.parse_args(arguments)
    summaries: list[MethodSummary] = []
    for run in options.run:
        found = summarise_folder(run / "results", _method_order(run))
        if not found:
            raise ValueError(f"{run}: expected results in {run / 'results'}, found none")
        summaries += found
    write_report(summaries, options.out or options.run[0], Console())
