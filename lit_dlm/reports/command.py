"""``lit-dlm report``: tables, a plot and a page from the results of several runs."""

from __future__ import annotations

import argparse
import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from lit_dlm.ops.options import at_least
from lit_dlm.reports.page import (
    Disagreement,
    Picture,
    ReportContent,
    SampleGroup,
    disagreement,
    failures_first,
    report_html,
    report_markdown,
    trace_link,
)
from lit_dlm.reports.results import ResultFolder, write_atomically
from lit_dlm.reports.samples import SampleSet, load_samples
from lit_dlm.reports.summary import MethodSummary, summarise_folder, write_summary
from lit_dlm.reports.tables import by_task, markdown_tables, terminal_tables

logger = logging.getLogger(__name__)

TRACES_PAGE = "traces.html"
MAX_CURVES = 9
"""Training curves shown of each run."""


def write_report(summaries: Sequence[MethodSummary], folder: Path, console: Console) -> None:
    """Writes ``summary.json``, ``summary.md`` and ``front.png``, and prints the tables.

    ``front_dark.png`` is the plot for dark pages.
    """
    # Here: matplotlib takes a second to import.
    from lit_dlm.reports.plots import plot_front

    write_summary(folder / "summary.json", summaries)
    write_atomically(folder / "summary.md", markdown_tables(summaries))
    plot_front(summaries, folder / "front.png")
    plot_front(summaries, folder / "front_dark.png", theme="dark")
    for table in terminal_tables(summaries):
        console.print(table)
    console.print(f"Summary, table and plot: {folder}")


@dataclass(frozen=True, kw_only=True)
class ReportedRun:
    """One run of a report."""

    folder: Path
    summaries: list[MethodSummary]
    labels: dict[tuple[str, str], str]
    """Names of its methods in the tables, by task and own name."""


def write_pages(
    runs: Sequence[ReportedRun], folder: Path, *, num_samples: int, traces: bool, title: str
) -> list[Path]:
    """Writes ``report.html`` and ``report.md``; with ``traces`` the viewer page of their samples.

    That is ``traces.html``, where trajectories were kept. Of each method on each task
    ``num_samples`` are shown.
    """
    best: list[SampleGroup] = []
    others: list[SampleGroup] = []
    differing: list[Disagreement] = []
    shown: list[set[str]] = []
    for run in runs:
        results = ResultFolder(run.folder / "results")
        seen: set[str] = set()
        for task, group in by_task(run.summaries):
            ordered = _by_accuracy(group)
            first = ordered[0] if ordered else None
            rows = {one.method: results.rows(task, one.method) for one in group}
            for one in group:
                label = run.labels[task, one.method]
                found = failures_first(task, label, rows[one.method], limit=num_samples)
                (best if one.method == first else others).append(found)
                seen |= {row.uid for row in found.rows}
            if len(ordered) > 1:
                pair = [(run.labels[task, name], rows[name]) for name in ordered[:2]]
                split = disagreement(task, *pair[0], *pair[1], num_samples)
                differing += [split] if split.pairs else []
                seen |= {row.uid for row, _ in split.pairs}
        shown.append(seen)
    links: dict[tuple[str, str, str], str] = {}
    written: list[Path] = []
    notes = [
        f"Code of {summary.task} ran in {summary.isolation} when it was graded."
        for run in runs
        for summary in run.summaries
        if summary.isolation is not None
    ]
    if traces:
        sets = _sample_sets(runs, shown)
        if sets:
            _write_traces(folder / TRACES_PAGE, sets, title)
            written.append(folder / TRACES_PAGE)
        for number, (run, samples) in enumerate(sets):
            for sample in samples.samples:
                label = run.labels.get((sample.task, sample.method), sample.method)
                key = (sample.task, label, sample.example)
                links[key] = trace_link(TRACES_PAGE, sample.record.uid, number)
        without = [run.folder.name for run in runs if run not in [kept for kept, _ in sets]]
        if without:
            notes.append(
                f"There are no trajectories of {', '.join(without)}, so no traces to open."
            )
    merged = merge_runs([(run.folder.resolve().name, run.summaries) for run in runs])
    fronts, curves = _pictures(merged, runs)
    content = ReportContent(
        title=title,
        summaries=merged,
        best=best if num_samples else [],
        disagreements=differing,
        others=sorted(others, key=lambda group: -group.num_wrong) if num_samples else [],
        fronts=fronts,
        curves=curves,
        facts={run.folder.resolve().name: _told_facts(run) for run in runs},
        notes=list(dict.fromkeys(notes)),
        links=links,
    )
    write_atomically(folder / "report.html", report_html(content))
    picture = "front.png" if fronts else None
    write_atomically(folder / "report.md", report_markdown(content, front=picture))
    return [folder / "report.html", folder / "report.md", *written]


def _sample_sets(
    runs: Sequence[ReportedRun], shown: Sequence[set[str]]
) -> list[tuple[ReportedRun, SampleSet]]:
    """The shown prompts with all their decodes, of the runs whose trajectories are here."""
    found = []
    for run, examples in zip(runs, shown, strict=True):
        results = ResultFolder(run.folder / "results")
        folders = {
            run.folder / row.trajectory["set"]
            for pair in results.pairs()
            for row in results.rows(*pair)
            if row.trajectory is not None
        }
        missing = sorted(str(folder) for folder in folders if not folder.is_dir())
        if missing:
            logger.warning("%s: not here, so there are no traces to open", ", ".join(missing))
        elif folders:
            found.append((run, load_samples(run.folder, examples=examples)))
    return found


def _write_traces(path: Path, sets: Sequence[tuple[ReportedRun, SampleSet]], title: str) -> None:
    # Here: transformers takes seconds to import.
    from lit_dlm.reports.viewer import ViewedSet, write_viewer
    from lit_dlm.reports.viewer_command import pieces_of

    viewed = [ViewedSet(samples=one, pieces=pieces_of(one.shards, None)) for _, one in sets]
    write_viewer(path, viewed, title=title)


def _by_accuracy(group: Sequence[MethodSummary]) -> list[str]:
    """The most accurate method, the most accurate one of another kind, and the others."""
    # Here: matplotlib takes a second to import.
    from lit_dlm.reports.plots import family

    graded = [one for one in group if one.accuracy is not None]
    names = [one.method for one in sorted(graded, key=lambda s: (-(s.accuracy or 0.0), s.nfe))]
    return names[:1] + sorted(names[1:], key=lambda name: family(name) == family(names[0]))


def _told_facts(run: ReportedRun) -> dict[str, str]:
    facts = ResultFolder(run.folder / "results").facts()
    versions = facts.pop("versions", {})
    if "commit" in versions:
        versions["commit"] = versions["commit"][:12]
    told = {
        key: f"{value:,}" if key == "parameters" else str(value)
        for key, value in facts.items()
        if value is not None
    }
    told |= {"versions": ", ".join(map(" ".join, versions.items()))} if versions else {}
    return told


def _pictures(
    merged: Sequence[MethodSummary], runs: Sequence[ReportedRun]
) -> tuple[list[Picture], list[Picture]]:
    """One picture a task, and one a training curve: side by side, on a phone below each other."""
    from lit_dlm.reports.plots import front_figure
    from lit_dlm.reports.themes import THEMES, figure_png
    from lit_dlm.reports.training_curves import curve_figure, read_curves

    fronts, curves = [], []
    for task, group in by_task(merged):
        light, dark = (front_figure(group, theme=theme) for theme in ("light", "dark"))
        if light is not None and dark is not None:
            name = f"{task}: accuracy against average steps; bars are 95 % intervals"
            fronts.append(Picture(title=name, light=figure_png(light), dark=figure_png(dark)))
    for run in runs:
        for name, curve in list(read_curves(run.folder).items())[:MAX_CURVES]:
            drawn = [figure_png(curve_figure(curve, theme=t), dpi=110) for t in THEMES]
            title = f"{name}, training of {run.folder.resolve().name}"
            curves.append(Picture(title=title, light=drawn[0], dark=drawn[1]))
    return fronts, curves


def method_order(run: Path) -> list[str]:
    """Methods in the order of the run's own summary, which follows its configuration."""
    path = run / "summary.json"
    if not path.exists():
        return []
    return [record["method"] for record in json.loads(path.read_text())]


def main(arguments: Sequence[str]) -> int:
    """Runs the command on what follows its name; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="lit-dlm report",
        description="Tables, a speed-quality plot, and a page with failures first that links to "
        "the traces.",
    )
    parser.add_argument("run", nargs="+", type=Path, help="run folder that has a results/ folder")
    parser.add_argument("--out", type=Path, help="where the report goes (default: the first run)")
    parser.add_argument(
        "--samples",
        type=int,
        default=20,
        help="samples shown of each method on each task, 0 for none (default: 20)",
    )
    parser.add_argument(
        "--no_traces", action="store_true", help="do not write the viewer page of these samples"
    )
    options = parser.parse_args(arguments)
    at_least(0, of="--", samples=options.samples)
    found: list[tuple[Path, list[MethodSummary]]] = []
    for run in options.run:
        summaries = summarise_folder(run / "results", method_order(run))
        if not summaries:
            raise ValueError(f"{run}: expected results in {run / 'results'}, found none")
        found.append((run, summaries))
    folder, console = options.out or options.run[0], Console()
    named = [(run.resolve().name, summaries) for run, summaries in found]
    write_report(merge_runs(named), folder, console)
    runs = [
        ReportedRun(folder=run, summaries=summaries, labels=labels)
        for (run, summaries), labels in zip(found, method_labels(named), strict=True)
    ]
    pages = write_pages(
        runs,
        folder,
        num_samples=options.samples,
        traces=options.samples > 0 and not options.no_traces,
        title=f"Report of {', '.join(name for name, _ in named)}",
    )
    console.print(f"Pages: {', '.join(path.name for path in pages)}")
    return 0


def method_labels(
    runs: Sequence[tuple[str, list[MethodSummary]]],
) -> list[dict[tuple[str, str], str]]:
    """Names of methods in the tables of several runs, by task and the run's own name of the method.

    A method that several runs share, such as one decoder on differently trained models, gets the
    name of its run.
    """
    uses = Counter((s.task, s.method) for _, found in runs for s in found)
    labels = []
    for run, found in runs:
        is_alone = len({summary.method for summary in found}) == 1
        shared = run if is_alone else None
        labels.append(
            {
                (s.task, s.method): (shared or f"{run}/{s.method}")
                if uses[s.task, s.method] > 1
                else s.method
                for s in found
            }
        )
    return labels


def merge_runs(runs: Sequence[tuple[str, list[MethodSummary]]]) -> list[MethodSummary]:
    """The summaries of several runs, by name, as one list under their :func:`method_labels`.

    Tasks come in the order in which they first occur.
    """
    merged: dict[str, list[MethodSummary]] = {}
    for (_, found), labels in zip(runs, method_labels(runs), strict=True):
        for summary in found:
            label = labels[summary.task, summary.method]
            merged.setdefault(summary.task, []).append(replace(summary, method=label))
    return [summary for group in merged.values() for summary in group]
