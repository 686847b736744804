"""``lit-dlm compare A B``: paired significance of two runs, task by task and method by method."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lit_dlm.reports.results import ResultFolder, setting_differences, write_atomically
from lit_dlm.reports.significance import PairedComparison, compare_rows, holm
from lit_dlm.reports.summary import markdown_table

HEADERS = (
    "method", "n", "accuracy A", "accuracy B", "B - A (95 %)", "only A", "only B", "p", "p (Holm)",
    "steps A", "steps B", "B - A (95 %)",
)  # fmt: skip
NOTE = (
    "Paired on the samples that both have; of several responses to a prompt, the first. p: exact "
    "McNemar test, two-sided; p (Holm): adjusted for all rows. Intervals: paired bootstrap, 10,000 "
    "resamples. only A, only B: samples that just this one got right. Steps: mean forwards of the "
    "backbone."
)
MAX_DIFFERENCES = 8


def main(arguments: Sequence[str]) -> int:
    """Runs the command on what follows its name; returns the exit status."""
    command = argparse.ArgumentParser(
        prog="lit-dlm compare",
        description="Compares two benchmark runs on the samples that both have: accuracy with an "
        "exact McNemar test, accuracy and steps with paired bootstrap intervals. Methods of equal "
        "name are paired; with --a and --b, these two.",
    )
    command.add_argument("first", type=Path, metavar="A", help="run folder with results/")
    command.add_argument("second", type=Path, metavar="B", help="run folder, may be the same one")
    command.add_argument("--a", metavar="METHOD", help="method of A")
    command.add_argument("--b", metavar="METHOD", help="method of B")
    command.add_argument("--json", action="store_true", help="print one JSON list instead")
    command.add_argument(
        "--out", type=Path, metavar="FILE", help="also write the table as Markdown"
    )
    options = command.parse_args(list(arguments))
    is_one_run = options.first.resolve() == options.second.resolve()
    if (options.a is None) != (options.b is None) or (is_one_run and options.a is None):
        raise ValueError(
            "--a and --b: give both, as for two methods of one run, or neither to pair methods of "
            "equal name"
        )
    first, second = (
        ResultFolder(path if path.name == "results" else path / "results")
        for path in (options.first, options.second)
    )
    pairs = method_pairs(first, second, a=options.a, b=options.b)
    found = compare_methods(first, second, pairs)
    console = Console()
    if options.json:
        console.print_json(json.dumps([asdict(comparison) for comparison in found]))
        return 0
    for task, group in groupby(found, key=lambda one: one.task):
        console.print(_table(task, list(group)))
    console.print(f"A: {options.first}   B: {options.second}", style="bold", highlight=False)
    console.print(NOTE, highlight=False)
    for line in _setting_lines(first, second, pairs):
        console.print(line, highlight=False, markup=False)
    if options.out is not None:
        write_atomically(options.out, markdown(found, options.first, options.second))
        console.print(f"Table: {options.out}")
    return 0


def method_pairs(
    first: ResultFolder, second: ResultFolder, *, a: str | None = None, b: str | None = None
) -> list[tuple[str, str, str]]:
    """What to compare: (task, method of A, method of B), in alphabetical order.

    Without ``a`` and ``b``, methods of equal name, or else the only ones of a task.
    """
    of_a, of_b = (
        {
            task: [name for _, name in group if results.completed(task, name)]
            for task, group in groupby(results.pairs(), key=lambda pair: pair[0])
        }
        for results in (first, second)
    )
    tasks = sorted(of_a.keys() & of_b.keys())
    if a is not None and b is not None:
        pairs = [(task, a, b) for task in tasks if a in of_a[task] and b in of_b[task]]
    else:
        pairs = [(task, name, name) for task in tasks for name in of_a[task] if name in of_b[task]]
        alone = [task for task in tasks if len(of_a[task]) == len(of_b[task]) == 1]
        pairs = pairs or [(task, of_a[task][0], of_b[task][0]) for task in alone]
    if not pairs:
        known = (
            "; ".join(f"{task}: {', '.join(names)}" for task, names in of.items()) or "no results"
            for of in (of_a, of_b)
        )
        wanted = f"{a!r} of A and {b!r} of B" if a else "methods of equal name, or --a and --b,"
        raise ValueError(
            f"expected {wanted} on a common task; {first.folder.parent} has {next(known)}; "
            f"{second.folder.parent} has {next(known)}"
        )
    return pairs


def compare_methods(
    first: ResultFolder, second: ResultFolder, pairs: Sequence[tuple[str, str, str]]
) -> list[PairedComparison]:
    """Compares (task, method of A, method of B); p-values are adjusted for all of them."""
    found = [compare_rows(first.rows(task, a), second.rows(task, b)) for task, a, b in pairs]
    adjusted = holm([comparison.p_value for comparison in found])
    return [
        replace(comparison, p_adjusted=p) for comparison, p in zip(found, adjusted, strict=True)
    ]


def markdown(found: Sequence[PairedComparison], a: Path, b: Path) -> str:
    """The comparisons, sorted by task, as one Markdown table per task."""
    tables = (
        markdown_table(task, HEADERS, *map(cells, group), heading="##")
        for task, group in groupby(found, key=lambda one: one.task)
    )
    return "\n".join(["# Comparison", "", f"A: `{a}`, B: `{b}`", "", *tables, NOTE, ""])


def cells(found: PairedComparison) -> tuple[str, ...]:
    """A comparison as the texts of :data:`HEADERS`."""
    a, b = found.method_a, found.method_b
    gain = 100 * (found.accuracy_b - found.accuracy_a)
    low, high = (100 * bound for bound in found.accuracy_interval)
    return (
        a if a == b else f"{a} / {b}",
        str(found.n),
        f"{100 * found.accuracy_a:.1f} %",
        f"{100 * found.accuracy_b:.1f} %",
        f"{gain:+.1f} ({low:+.1f} to {high:+.1f})",
        str(found.only_a),
        str(found.only_b),
        _spoken_p(found.p_value),
        _spoken_p(found.p_adjusted),
        f"{found.nfe_a:.1f}",
        f"{found.nfe_b:.1f}",
        f"{found.nfe_b - found.nfe_a:+.1f} "
        f"({found.nfe_interval[0]:+.1f} to {found.nfe_interval[1]:+.1f})",
    )


def _spoken_p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _table(task: str, group: Sequence[PairedComparison]) -> Table:
    """A line for A and one for B of each comparison, which fit into 80 columns."""
    counts = sorted({comparison.n for comparison in group})
    title = f"{task}, n = {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))}"
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.add_column("method", no_wrap=True)
    for header in ("right, %", "only one", "B - A (95 %)", "p (Holm)", "steps"):
        table.add_column(header, justify="right", no_wrap=True)
    for one in group:
        _, _, a, b, gain, only_a, only_b, p, adjusted, steps_a, steps_b, _ = cells(one)
        table.add_row(
            f"A {one.method_a}\nB {one.method_b}",
            f"{a.removesuffix(' %')}\n{b.removesuffix(' %')}",
            f"{only_a}\n{only_b}",
            gain.replace(" ", "\n", 1),
            f"{p}\n({adjusted})",
            f"{steps_a}\n{steps_b}",
        )
    return table


def _setting_lines(
    first: ResultFolder, second: ResultFolder, pairs: Sequence[tuple[str, str, str]]
) -> list[str]:
    """What was set differently, as far as the result folders say."""
    lines: dict[str, None] = {}
    for task, a, b in pairs:
        ours, theirs = first.settings(task, a), second.settings(task, b)
        lines |= dict.fromkeys(setting_differences(ours, theirs))
    if not lines:
        return ["The recorded settings are equal."]
    shown = [f"  {line}" for line in lines][:MAX_DIFFERENCES]
    if len(lines) > len(shown):
        shown.append(f"  and {len(lines) - len(shown)} more")
    return ["Settings that differ, of A, now of B:", *shown]
