"""``lit-dlm report``: tables, a plot, and a page with failures first, of several runs."""

from __future__ import annotations

import argparse
import logging
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from lit_dlm.reports.pages import fill, render
from lit_dlm.reports.results import ResultFolder, ResultRow
from lit_dlm.reports.samples import SampleSet, load_samples
from lit_dlm.reports.summary import (
    MethodSummary,
    by_task,
    markdown_tables,
    summarise_run,
    table_rows,
)
from lit_dlm.reports.tables import print_table
from lit_dlm.system.files import write_atomically, write_json
from lit_dlm.system.terminal import PlainConsole, printable

logger = logging.getLogger(__name__)

TRACES_PAGE = "traces.html"
MAX_TEXT = 1200  # characters of a completion that the page shows
NUM_SAMPLES = 20  # samples shown of each method on each task


@dataclass(frozen=True, kw_only=True)
class ReportedRun:
    """One run of a report."""

    folder: Path
    name: str  # the end of its path that no other run has
    summaries: Sequence[MethodSummary]
    labels: Mapping[tuple[str, str], str]  # names in the tables, by task and own name

    @property
    def results(self) -> ResultFolder:
        return ResultFolder(self.folder / "results")


@dataclass(frozen=True, kw_only=True)
class SampleGroup:
    """Samples of a task that are shown together, with their decodes by one or two methods."""

    task: str
    methods: tuple[str, ...]
    counts: str  # in words, the heading of the group
    num_wrong: int  # in all, for one method; the page shows NUM_SAMPLES at most
    samples: Sequence[tuple[ResultRow, ...]]  # one row per method

    @property
    def failures(self) -> list[ResultRow]:
        return [rows[0] for rows in self.samples if is_wrong(rows[0])]


class Plot(NamedTuple):
    """A plot as PNG, for light and for dark pages."""

    title: str
    light: bytes
    dark: bytes


def main(arguments: Sequence[str]) -> int:
    """Runs the command with the arguments after its name."""
    parser = argparse.ArgumentParser(
        prog="lit-dlm report",
        description="Tables, a speed-quality plot, and a page with failures first that links to "
        "the traces.",
    )
    parser.add_argument("run", nargs="+", type=Path, help="run folder that has a results/ folder")
    parser.add_argument("--out", type=Path, help="where the report goes (default: the first run)")
    options = parser.parse_args(arguments)
    runs = labelled([(run, summarise_run(run)) for run in options.run])
    folder, console, merged = options.out or options.run[0], PlainConsole(), merge_runs(runs)
    write_report(merged, folder, console)
    title = f"Report of {', '.join(run.name for run in runs)}"
    pages = write_pages(runs, merged, folder, title=title)
    console.print(f"Pages: {', '.join(pages)}")
    run, *others = map(str, options.run)
    best = _by_accuracy([one for one in merged if one.task == merged[0].task])
    if others or len(best) > 1:
        words = [run, others[0]] if others else [run, run, "--a", best[0], "--b", best[1]]
        command = shlex.join(["lit-dlm", "compare", *words])
        console.print(f"next: {command}", highlight=False, soft_wrap=True)
    return 0


def write_report(summaries: Sequence[MethodSummary], folder: Path, console: PlainConsole) -> None:
    """Writes ``summary.json``, ``summary.md`` and, if graded, ``front.png``; prints the tables."""
    # Imported here, as matplotlib takes a second to import.
    from lit_dlm.reports.plots import front_figure, save_themes

    write_json(folder / "summary.json", [asdict(summary) for summary in summaries])
    write_atomically(folder / "summary.md", printable(markdown_tables(summaries)))
    save_themes(folder / "front.png", lambda theme: front_figure(summaries, theme))
    for task, group in by_task(summaries):
        headers, *rows = table_rows(group)
        print_table(console, task, headers, rows)
    console.print(f"Summary, table and plot: {folder}")


def labelled(runs: Sequence[tuple[Path, list[MethodSummary]]]) -> list[ReportedRun]:
    """Names the methods of runs in common tables, after their run if another one has them, too."""
    uses = Counter((one.task, one.method) for _, summaries in runs for one in summaries)
    paths = [folder.resolve().parts for folder, _ in runs]
    reported = []
    for (folder, summaries), parts in zip(runs, paths, strict=True):
        # The shortest end that is no other run's: seed0/bench beside seed1/bench, not bench twice.
        ends = [parts[-n:] for n in range(1, len(parts) + 1)]
        own = (end for end in ends if [path[-len(end) :] for path in paths].count(end) == 1)
        run, labels = "/".join(next(own, ends[0])), {}
        for one in summaries:
            is_shared = uses[one.task, one.method] > 1
            labels[one.task, one.method] = f"{run}/{one.method}" if is_shared else one.method
        reported.append(ReportedRun(folder=folder, name=run, summaries=summaries, labels=labels))
    return reported


def merge_runs(runs: Sequence[ReportedRun]) -> list[MethodSummary]:
    """Returns the summaries of several runs, with their names in common tables, task by task."""
    merged = [
        replace(one, method=run.labels[one.task, one.method])
        for run in runs
        for one in run.summaries
    ]
    tasks = list(dict.fromkeys(one.task for one in merged))
    return sorted(merged, key=lambda one: tasks.index(one.task))


def is_wrong(row: ResultRow) -> bool:
    """Whether a grader found the row's answer wrong."""
    return not row.correct and row.verdict != "ungraded"


def failures_first(task: str, method: str, rows: Sequence[ResultRow]) -> SampleGroup:
    """Wrong samples, then ungraded, then right ones, each by uid."""
    # Failures are what a reader can learn from, and a page has room for a few samples only.
    ordered = sorted(rows, key=lambda row: (not is_wrong(row), row.correct, row.uid))
    shown, num_wrong = ordered[:NUM_SAMPLES], sum(map(is_wrong, rows))
    counts = f"{method}: {num_wrong} of {len(rows)} wrong"
    counts += f", {len(shown)} shown" * (len(shown) < len(rows))
    samples = [(row,) for row in shown]
    return SampleGroup(
        task=task, methods=(method,), counts=counts, num_wrong=num_wrong, samples=samples
    )


def disagreement(
    task: str, methods: tuple[str, str], one: Sequence[ResultRow], two: Sequence[ResultRow]
) -> SampleGroup:
    """Samples that exactly one of two methods got right, those of the second first."""
    other = {row.uid: row for row in two}
    pairs = [(row, other[row.uid]) for row in one if row.uid in other]
    split = [pair for pair in pairs if pair[0].correct != pair[1].correct]
    # What the better method lost comes first: there lies what another decoder could still gain.
    split.sort(key=lambda pair: (pair[0].correct, pair[0].uid))
    by_first = sum(pair[0].correct for pair in split)
    counts = f"{by_first} right by {methods[0]} alone, "
    counts += f"{len(split) - by_first} by {methods[1]} alone"
    counts += f", {NUM_SAMPLES} shown" * (len(split) > NUM_SAMPLES)
    shown = split[:NUM_SAMPLES]
    return SampleGroup(task=task, methods=methods, counts=counts, num_wrong=0, samples=shown)


def write_pages(
    runs: Sequence[ReportedRun], merged: Sequence[MethodSummary], folder: Path, *, title: str
) -> list[str]:
    """Writes ``report.html``, ``report.md`` and, if trajectories were kept, ``traces.html``."""
    best, others, splits = _groups(runs)
    shown = {
        row.prompt_uid for one in (*best, *others, *splits) for rows in one.samples for row in rows
    }
    traces = [(run, _traces(run, shown)) for run in runs]
    traced = [(run, samples) for run, samples in traces if samples is not None]
    fronts = _fronts(merged)
    content = {
        "title": title,
        "best": best,
        "disagreements": splits,
        "others": sorted(others, key=lambda group: -group.num_wrong),
        "metadata": {run.name: _metadata(run) for run in runs},
        "notes": _notes(traces),
        "links": _links(traced),
    }
    page = render(
        "report",
        scripts=["sort.js"],
        tables=[(task, table_rows(group)) for task, group in by_task(merged)],
        max_text=MAX_TEXT,
        fronts=fronts,
        curves=[plot for run in runs for plot in _curves(run)],
        **content,
    )
    write_atomically(folder / "report.html", page)
    tables = markdown_tables(merged).rstrip("\n")
    text = fill("report/page.md", tables=tables, front=bool(fronts), **content)
    write_atomically(folder / "report.md", printable(text))
    if not traced:
        return ["report.html", "report.md"]
    # Imported here, as transformers takes seconds to import.
    from lit_dlm.reports.viewer import ViewedSet, write_viewer
    from lit_dlm.reports.viewer_command import pieces_of

    sets = [ViewedSet(samples=one, pieces=pieces_of(one.shards, None)) for _, one in traced]
    write_viewer(folder / TRACES_PAGE, sets, title=title)
    return ["report.html", "report.md", TRACES_PAGE]


def _notes(traces: Sequence[tuple[ReportedRun, SampleSet | None]]) -> list[str]:
    # Verdicts on code depend on the walls it ran behind: what one refuses, another lets pass.
    notes = [
        f"Code of {one.task} ran in {one.isolation} when it was graded."
        for run, _ in traces
        for one in run.summaries
        if one.isolation is not None
    ]
    if without := [run.name for run, samples in traces if samples is None]:
        notes.append(f"There are no trajectories of {', '.join(without)}, so no traces to open.")
    return list(dict.fromkeys(notes))


def _groups(
    runs: Sequence[ReportedRun],
) -> tuple[list[SampleGroup], list[SampleGroup], list[SampleGroup]]:
    """Samples of the best method of every task, of the others, and where the best two differ."""
    best: list[SampleGroup] = []
    others: list[SampleGroup] = []
    splits: list[SampleGroup] = []
    for run in runs:
        for task, group in by_task(run.summaries):
            ordered = _by_accuracy(group)
            rows = {one.method: run.results.rows(task, one.method) for one in group}
            for name in rows:
                # Without grades no method is the best, and all of them are others.
                groups = best if name in ordered[:1] else others
                groups.append(failures_first(task, run.labels[task, name], rows[name]))
            if len(ordered) > 1:
                first, second = ordered[:2]
                names = run.labels[task, first], run.labels[task, second]
                splits.append(disagreement(task, names, rows[first], rows[second]))
    return best, others, [split for split in splits if split.samples]


def _by_accuracy(group: Sequence[MethodSummary]) -> list[str]:
    from lit_dlm.reports.plots import family

    graded = [one for one in group if one.accuracy is not None]
    # Differences within one kind, such as between two thresholds, say less.
    names = [one.method for one in sorted(graded, key=lambda s: (-(s.accuracy or 0.0), s.nfe))]
    return names[:1] + sorted(names[1:], key=lambda name: family(name) == family(names[0]))


def _traces(run: ReportedRun, shown: set[str]) -> SampleSet | None:
    """The shown prompts with all their decodes; ``None`` if the trajectories are not here."""
    rows = [row for pair in run.results.pairs() for row in run.results.rows(*pair)]
    folders = {run.folder / row.trajectory["set"] for row in rows if row.trajectory is not None}
    if missing := sorted(str(folder) for folder in folders if not folder.is_dir()):
        logger.warning("%s: not here, so there are no traces to open", ", ".join(missing))
    # Some folders alone would give links that open nothing: all of a run's, or none.
    if missing or not folders:
        return None
    return replace(load_samples(run.folder, examples=shown), label=run.name)


def _links(traced: Sequence[tuple[ReportedRun, SampleSet]]) -> dict[tuple[str, str, str], str]:
    links = {}
    for number, (run, samples) in enumerate(traced):
        for sample in samples.samples:
            label = run.labels.get((sample.task, sample.method), sample.method)
            address = f"{TRACES_PAGE}#uid={quote(sample.record.uid, safe='')}"
            # A row's uid is that of its record without the method, which the table has as a label.
            uid = sample.record.uid.removesuffix(f"@{sample.method}")
            links[sample.task, label, uid] = address + f"&set={number}" * (number > 0)
    return links


def _metadata(run: ReportedRun) -> dict[str, str]:
    values: dict[str, Any] = {k: v for k, v in run.results.metadata().items() if v is not None}
    values.pop("skipped", None)  # the tables have it
    versions = values.pop("versions", {})
    if "commit" in versions:
        versions["commit"] = versions["commit"][:12]
    if "parameters" in values:
        values["parameters"] = f"{values['parameters']:,}"
    if versions:
        values["versions"] = ", ".join(map(" ".join, versions.items()))
    return {key: str(value) for key, value in values.items()}


def _fronts(merged: Sequence[MethodSummary]) -> list[Plot]:
    """A plot per task, shown side by side, or one below the other on a phone."""
    from lit_dlm.reports.plots import THEMES, figure_bytes, front_figure

    plots = []
    for task, group in by_task(merged):
        drawn = [figure for theme in THEMES.values() if (figure := front_figure(group, theme))]
        if drawn:
            title = f"{task}: accuracy against average steps; bars are 95 % intervals"
            plots.append(Plot(title, *map(figure_bytes, drawn)))
    return plots


def _curves(run: ReportedRun) -> list[Plot]:
    from lit_dlm.reports.plots import MAX_CURVES, THEMES, curve_figure, figure_bytes, read_curves

    plots = []
    for logs in sorted(run.folder.glob("**/logs")):  # a further training has a folder of its own
        where = Path(run.name, logs.parent.relative_to(run.folder))
        for name, curve in list(read_curves(logs).items())[:MAX_CURVES]:
            themed = (curve_figure({"": curve}, one) for one in THEMES.values())
            drawn = (figure_bytes(figure, dpi=110) for figure in themed)
            plots.append(Plot(f"{name}, training of {where}", *drawn))
    return plots
