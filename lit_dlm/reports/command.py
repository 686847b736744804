"""``lit-dlm report``: tables, a plot and a page from the results of several runs."""

from __future__ import annotations

import argparse
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

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
from lit_dlm.reports.summary import MethodSummary, summarise_run, write_summary
from lit_dlm.reports.tables import by_task, markdown_tables, terminal_tables

logger = logging.getLogger(__name__)

TRACES_PAGE = "traces.html"
NUM_SAMPLES = 20
"""Samples shown of each method on each task."""
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
    """One run of a report, and the samples that are shown of it."""

    folder: Path
    summaries: list[MethodSummary]
    labels: dict[tuple[str, str], str]
    """Names of its methods in the tables, by task and own name."""
    best: list[SampleGroup] = field(default_factory=list)
    others: list[SampleGroup] = field(default_factory=list)
    disagreements: list[Disagreement] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def results(self) -> ResultFolder:
        return ResultFolder(self.folder / "results")

    def choose_samples(self) -> None:
        """Failures of every method, and where the two most accurate ones differ."""
        for task, group in by_task(self.summaries):
            ordered = _by_accuracy(group)
            rows = {one.method: self.results.rows(task, one.method) for one in group}
            for name in rows:
                label = self.labels[task, name]
                groups = self.best if name in ordered[:1] else self.others
                groups.append(failures_first(task, label, rows[name], limit=NUM_SAMPLES))
            if len(ordered) > 1:
                pair = [(self.labels[task, name], rows[name]) for name in ordered[:2]]
                split = disagreement(task, *pair[0], *pair[1], NUM_SAMPLES)
                self.disagreements.extend([split] if split.pairs else [])

    def traces(self) -> SampleSet | None:
        """The shown prompts with all their decodes, where the trajectories are here."""
        shown = {row.uid for group in (*self.best, *self.others) for row in group.rows}
        shown |= {row.uid for split in self.disagreements for row, _ in split.pairs}
        folders = {
            self.folder / row.trajectory["set"]
            for pair in self.results.pairs()
            for row in self.results.rows(*pair)
            if row.trajectory is not None
        }
        missing = sorted(str(folder) for folder in folders if not folder.is_dir())
        if missing:
            logger.warning("%s: not here, so there are no traces to open", ", ".join(missing))
        return load_samples(self.folder, examples=shown) if folders and not missing else None


def write_pages(
    runs: Sequence[ReportedRun], merged: Sequence[MethodSummary], folder: Path, *, title: str
) -> list[Path]:
    """Writes ``report.html``, ``report.md`` and, where trajectories were kept, ``traces.html``."""
    for run in runs:
        run.choose_samples()
    notes = [
        f"Code of {summary.task} ran in {summary.isolation} when it was graded."
        for run in runs
        for summary in run.summaries
        if summary.isolation is not None
    ]
    found = [(run, run.traces()) for run in runs]
    traced = [(run, samples) for run, samples in found if samples is not None]
    if traced:
        _write_traces(folder / TRACES_PAGE, [samples for _, samples in traced], title)
    if without := [run.folder.name for run, samples in found if samples is None]:
        notes.append(f"There are no trajectories of {', '.join(without)}, so no traces to open.")
    fronts, curves = _pictures(merged, runs)
    content = ReportContent(
        title=title,
        summaries=merged,
        best=[group for run in runs for group in run.best],
        disagreements=[split for run in runs for split in run.disagreements],
        others=sorted(
            (group for run in runs for group in run.others), key=lambda group: -group.num_wrong
        ),
        fronts=fronts,
        curves=curves,
        facts={run.name: _told_facts(run) for run in runs},
        notes=list(dict.fromkeys(notes)),
        links=_links(traced),
    )
    write_atomically(folder / "report.html", report_html(content))
    picture = "front.png" if fronts else None
    write_atomically(folder / "report.md", report_markdown(content, front=picture))
    names = ["report.html", "report.md", *([TRACES_PAGE] if traced else [])]
    return [folder / name for name in names]


def _links(
    traced: Sequence[tuple[ReportedRun, SampleSet]],
) -> dict[tuple[str, str, str], str]:
    """Addresses of traces by task, method as in the tables, and uid."""
    links = {}
    for number, (run, samples) in enumerate(traced):
        for sample in samples.samples:
            label = run.labels.get((sample.task, sample.method), sample.method)
            key = (sample.task, label, sample.example)
            links[key] = trace_link(TRACES_PAGE, sample.record.uid, number)
    return links


def _write_traces(path: Path, sets: Sequence[SampleSet], title: str) -> None:
    # Here: transformers takes seconds to import.
    from lit_dlm.reports.viewer import ViewedSet, write_viewer
    from lit_dlm.reports.viewer_command import pieces_of

    viewed = [ViewedSet(samples=one, pieces=pieces_of(one.shards, None)) for one in sets]
    write_viewer(path, viewed, title=title)


def _by_accuracy(group: Sequence[MethodSummary]) -> list[str]:
    """The most accurate method, the most accurate one of another kind, and the others."""
    # Here: matplotlib takes a second to import.
    from lit_dlm.reports.plots import family

    graded = [one for one in group if one.accuracy is not None]
    names = [one.method for one in sorted(graded, key=lambda s: (-(s.accuracy or 0.0), s.nfe))]
    return names[:1] + sorted(names[1:], key=lambda name: family(name) == family(names[0]))


def _told_facts(run: ReportedRun) -> dict[str, str]:
    facts = run.results.facts()
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
    from lit_dlm.reports.themes import THEMES, figure_bytes
    from lit_dlm.reports.training_curves import curve_figure, read_curves

    fronts, curves = [], []
    for task, group in by_task(merged):
        light, dark = (front_figure(group, theme=theme) for theme in ("light", "dark"))
        if light is not None and dark is not None:
            name = f"{task}: accuracy against average steps; bars are 95 % intervals"
            fronts.append(Picture(title=name, light=figure_bytes(light), dark=figure_bytes(dark)))
    for run in runs:
        for name, curve in list(read_curves(run.folder).items())[:MAX_CURVES]:
            drawn = [figure_bytes(curve_figure(curve, theme=t), dpi=110) for t in THEMES]
            title = f"{name}, training of {run.name}"
            curves.append(Picture(title=title, light=drawn[0], dark=drawn[1]))
    return fronts, curves


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
    found = [(run, summarise_run(run)) for run in options.run]
    folder, console = options.out or options.run[0], Console()
    named = [(run.resolve().name, summaries) for run, summaries in found]
    merged = merge_runs(named)
    write_report(merged, folder, console)
    runs = [
        ReportedRun(folder=run, summaries=summaries, labels=labels)
        for (run, summaries), labels in zip(found, method_labels(named), strict=True)
    ]
    title = f"Report of {', '.join(name for name, _ in named)}"
    pages = write_pages(runs, merged, folder, title=title)
    console.print(f"Pages: {', '.join(path.name for path in pages)}")
    return 0


def method_labels(
    runs: Sequence[tuple[str, list[MethodSummary]]],
) -> list[dict[tuple[str, str], str]]:
    """Names of each run's methods in the tables, by task and own name.

    A method that several runs share, such as one decoder on differently trained models, gets the
    name of its run.
    """
    uses = Counter((s.task, s.method) for _, found in runs for s in found)
    labels = []
    for run, found in runs:
        pairs = [(s.task, s.method) for s in found]
        is_alone = len({method for _, method in pairs}) == 1
        names = {pair: run if is_alone else f"{run}/{pair[1]}" for pair in pairs}
        labels.append({pair: names[pair] if uses[pair] > 1 else pair[1] for pair in pairs})
    return labels


def merge_runs(runs: Sequence[tuple[str, list[MethodSummary]]]) -> list[MethodSummary]:
    """The summaries of several runs under their :func:`method_labels`, task by task."""
    merged: dict[str, list[MethodSummary]] = {}
    for (_, found), labels in zip(runs, method_labels(runs), strict=True):
        for summary in found:
            label = labels[summary.task, summary.method]
            merged.setdefault(summary.task, []).append(replace(summary, method=label))
    return [summary for group in merged.values() for summary in group]
