"""``lit-dlm compare A B``: paired significance of two runs, task by task and method by method."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path

from rich.box import SIMPLE_HEAD

from lit_dlm.config.files import setting_differences
from lit_dlm.reports.results import ResultFolder
from lit_dlm.reports.significance import PairedComparison, compare_rows, holm
from lit_dlm.reports.summary import markdown_table
from lit_dlm.reports.tables import print_table
from lit_dlm.system.files import write_atomically
from lit_dlm.system.terminal import PlainConsole

HEADERS = ("method", "right, %", "only one", "B - A (95 %)", "p (Holm)", "steps")
NOTE = (
    "Paired on the samples that both have; of several responses to a prompt, the first. p: exact "
    "McNemar test, two-sided; p (Holm): adjusted for all rows. Intervals: paired bootstrap, 10,000 "
    "resamples. only one: samples that just this one got right. Steps: mean forwards of the "
    "backbone."
)
MAX_DIFFERENCES = 8


def main(arguments: Sequence[str]) -> int:
    """Runs the command with the arguments after its name; returns the exit status."""
    command = argparse.ArgumentParser(
        prog="lit-dlm compare",
        description="Compares two benchmark runs on the samples that both have: accuracy with an "
        "exact McNemar test and paired bootstrap intervals, those of steps with --json. Methods of "
        "equal name are paired; with --a and --b, these two.",
    )
    command.add_argument("first", type=Path, metavar="A", help="run folder with results/")
    command.add_argument("second", type=Path, metavar="B", help="run folder, may be the same one")
    command.add_argument("--a", metavar="METHOD", help="method of A")
    command.add_argument("--b", metavar="METHOD", help="method of B")
    command.add_argument("--json", action="store_true", help="print one JSON list instead")
    command.add_argument("--out", type=Path, metavar="FILE", help="also write it as Markdown")
    options = command.parse_args(list(arguments))
    is_one_run = options.first.resolve() == options.second.resolve()
    if (options.a is None) != (options.b is None) or (is_one_run and options.a is None):
        command.error("--a and --b: give both, as for two methods of one run, or neither")
    pair = options.first, options.second
    first, second = (ResultFolder(x if x.name == "results" else x / "results") for x in pair)
    pairs = method_pairs(first, second, a=options.a, b=options.b)
    compared = [compare_rows(first.rows(task, a), second.rows(task, b)) for task, a, b in pairs]
    # Over all of them: whoever looks at ten comparisons finds one with p < 0.1 by chance.
    adjusted = holm([one.p_value for one in compared])
    compared = [replace(one, p_adjusted=p) for one, p in zip(compared, adjusted, strict=True)]
    console = PlainConsole()
    if options.out is not None:
        write_atomically(options.out, markdown(compared, options.first, options.second))
    if options.json:
        console.print_json(json.dumps([*map(asdict, compared)]), ensure_ascii=True)
        return 0
    for title, rows in tables(compared):
        print_table(console, title, HEADERS, rows, box=SIMPLE_HEAD)
    console.print(f"A: {options.first}   B: {options.second}", style="bold", highlight=False)
    console.print(NOTE, highlight=False)
    for line in _setting_lines(first, second, pairs):
        console.print(line, highlight=False)
    if options.out is not None:
        console.print(f"Table: {options.out}")
    return 0


def method_pairs(
    first: ResultFolder, second: ResultFolder, *, a: str | None = None, b: str | None = None
) -> list[tuple[str, str, str]]:
    """(task, method of A, method of B): those named, those of equal name, or a task's only ones."""
    of_a, of_b = _methods(first), _methods(second)
    both = [(task, of_a[task], of_b[task]) for task in sorted(of_a.keys() & of_b)]
    if a and b:
        pairs = [(task, a, b) for task, one, two in both if a in one and b in two]
    else:
        pairs = [(task, name, name) for task, one, two in both for name in one if name in two]
        # Two fine-tunings may each name their single method after themselves.
        pairs = pairs or [(task, one[0], two[0]) for task, one, two in both if len(one + two) == 2]
    if not pairs:
        wanted = f"{a!r} of A and {b!r} of B" if a else "methods of equal name, or --a and --b,"
        raise ValueError(
            f"expected {wanted} on a common task; {first.folder.parent} has {_listed(of_a)}; "
            f"{second.folder.parent} has {_listed(of_b)}"
        )
    return pairs


def _methods(results: ResultFolder) -> dict[str, list[str]]:
    methods: dict[str, list[str]] = {}
    for task, method in results.pairs():
        if results.completed(task, method):
            methods.setdefault(task, []).append(method)
    return methods


def _listed(methods: dict[str, list[str]]) -> str:
    listed = (f"{task}: {', '.join(names)}" for task, names in methods.items())
    return "; ".join(listed) or "no results"


def tables(compared: Sequence[PairedComparison]) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Yields title and rows of the table of each task; a row has a line for A and one for B."""
    for task, of_task in groupby(compared, key=lambda one: one.task):
        group = list(of_task)
        counts = {
            f"{task}, n =": [one.n for one in group],
            ", left out of A:": [one.left_out_a for one in group],
            ", left out of B:": [one.left_out_b for one in group],
            ", of other problems or templates:": [one.differing for one in group],
        }
        title = "".join(
            f"{label} {' to '.join(map(str, sorted({min(n), max(n)})))}"
            for label, n in counts.items()
            if any(n)
        )
        yield title, [_row(one) for one in group]


def _row(one: PairedComparison) -> tuple[str, ...]:
    low, high = (100 * bound for bound in one.accuracy_interval)
    return (
        f"A {one.method_a}\nB {one.method_b}",
        f"{100 * one.accuracy_a:.1f}\n{100 * one.accuracy_b:.1f}",
        f"{one.only_a}\n{one.only_b}",
        f"{100 * (one.accuracy_b - one.accuracy_a):+.1f}\n({low:+.1f} to {high:+.1f})",
        f"{_p_text(one.p_value)}\n({_p_text(one.p_adjusted)})",
        f"{one.nfe_a:.1f}\n{one.nfe_b:.1f}",
    )


def _p_text(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def markdown(compared: Sequence[PairedComparison], a: Path, b: Path) -> str:
    """The same tables as Markdown."""
    texts = []
    for title, rows in tables(compared):
        cells = [[text.replace("\n", "<br>") for text in row] for row in rows]
        texts.append(markdown_table(title, HEADERS, *cells, heading="##"))
    return "\n".join(["# Comparison", "", f"A: `{a}`, B: `{b}`", "", *texts, NOTE, ""])


def _setting_lines(
    first: ResultFolder, second: ResultFolder, pairs: Sequence[tuple[str, str, str]]
) -> list[str]:
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
