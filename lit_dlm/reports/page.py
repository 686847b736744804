"""The report page of benchmark runs: facts, front, tables, failures and disagreements, curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from lit_dlm.reports.results import ResultRow
from lit_dlm.reports.summary import MethodSummary
from lit_dlm.reports.tables import by_task, markdown_tables, table_rows
from lit_dlm.reports.template import fill, render

MAX_TEXT = 1200
"""Characters of a completion that the page shows."""


@dataclass(frozen=True, kw_only=True)
class SampleGroup:
    """The samples of one method on one task, failures first."""

    task: str
    method: str
    rows: list[ResultRow]
    """Those that are shown."""
    num_wrong: int
    num_rows: int

    @property
    def wrong(self) -> list[ResultRow]:
        return [row for row in self.rows if is_wrong(row)]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A PNG picture for light and for dark pages."""

    title: str
    light: bytes
    dark: bytes


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """The samples of a task on which just one of two methods is right."""

    task: str
    first: str
    """Name of the most accurate method."""
    second: str
    num_first: int
    """Samples that only ``first`` got right."""
    num_second: int
    pairs: list[tuple[ResultRow, ResultRow]]
    """Those that are shown, ``second`` right first."""


@dataclass(frozen=True, kw_only=True)
class ReportContent:
    """Everything on the page."""

    title: str
    summaries: Sequence[MethodSummary]
    best: Sequence[SampleGroup]
    """Of the most accurate method of every task."""
    disagreements: Sequence[Disagreement]
    others: Sequence[SampleGroup]
    fronts: Sequence[Picture]
    curves: Sequence[Picture]
    facts: Mapping[str, Mapping[str, str]]
    """What is known of every run, by its name."""
    notes: Sequence[str]
    """Sentences under the title."""
    links: Mapping[tuple[str, str, str], str]
    """Addresses of traces by task, method and uid."""

    def link(self, row: ResultRow, method: str) -> str | None:
        return self.links.get((row.task, method, row.uid))


def is_wrong(row: ResultRow) -> bool:
    """Whether a grader found it wrong."""
    return not row.correct and row.verdict != "ungraded"


def failures_first(task: str, method: str, rows: Sequence[ResultRow], *, limit: int) -> SampleGroup:
    """At most ``limit`` samples to show: wrong ones, then ungraded, then right, each by uid."""
    ordered = sorted(rows, key=lambda row: (not is_wrong(row), row.correct, row.uid))
    num_wrong = sum(map(is_wrong, rows))
    return SampleGroup(
        task=task, method=method, rows=ordered[:limit], num_wrong=num_wrong, num_rows=len(rows)
    )


def disagreement(
    task: str,
    first: str,
    one: Sequence[ResultRow],
    second: str,
    two: Sequence[ResultRow],
    limit: int,
) -> Disagreement:
    """Pairs of rows of one uid that were graded differently, at most ``limit`` to show."""
    other = {row.uid: row for row in two}
    pairs = [(row, other[row.uid]) for row in one if row.uid in other]
    found = sorted(
        (pair for pair in pairs if pair[0].correct != pair[1].correct),
        key=lambda pair: (pair[0].correct, pair[0].uid),
    )
    num_first = sum(pair[0].correct for pair in found)
    return Disagreement(
        task=task,
        first=first,
        second=second,
        num_first=num_first,
        num_second=len(found) - num_first,
        pairs=found[:limit],
    )


def trace_link(page: str, uid: str, number: int) -> str:
    """Address of a decode in the viewer page, by its uid and the number of its set there."""
    place = f"&set={number}" if number else ""
    return f"{quote(page)}#uid={quote(uid, safe='')}{place}"


def report_html(content: ReportContent) -> str:
    """The page as one HTML file that asks for nothing."""
    tables = []
    for task, group in by_task(content.summaries):
        headers, *rows = table_rows(group)
        tables.append((task, headers, rows))
    return render(
        "report",
        scripts=["sort.js"],
        images=True,
        title=content.title,
        content=content,
        tables=tables,
        max_text=MAX_TEXT,
    )


def report_markdown(content: ReportContent, *, front: str | None) -> str:
    """The same as Markdown: tables, the picture ``front`` if there is one, and failures."""
    tables = markdown_tables(content.summaries).rstrip("\n")
    groups = [group for group in (*content.best, *content.others) if group.wrong]
    return fill("report/page.md", content=content, tables=tables, front=front, groups=groups)
