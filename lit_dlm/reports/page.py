"""The report page of benchmark runs: tables, front, failures first, training curves."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from lit_dlm.reports.results import ResultRow
from lit_dlm.reports.summary import MethodSummary
from lit_dlm.reports.tables import by_task, markdown_tables, table_rows

ASSETS = Path(__file__).resolve().parent / "assets" / "report"
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


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture on a light and on a dark page."""

    title: str
    light: bytes
    """PNG."""
    dark: bytes


@dataclass(frozen=True, kw_only=True)
class ReportContent:
    """Everything on the page."""

    title: str
    summaries: Sequence[MethodSummary]
    groups: Sequence[SampleGroup]
    pictures: Sequence[Picture] = ()
    notes: Sequence[str] = ()
    """Sentences under the title."""
    links: dict[tuple[str, str, str], str] = field(default_factory=dict)
    """Addresses of traces by task, method and uid."""

    def link(self, row: ResultRow, method: str) -> str | None:
        """Address of a row's trace."""
        return self.links.get((row.task, method, row.uid))


def failures_first(task: str, method: str, rows: Sequence[ResultRow], *, limit: int) -> SampleGroup:
    """At most ``limit`` samples to show: wrong ones, then ungraded, then right, each by uid."""
    rank = {False: 0, True: 2}
    ordered = sorted(
        rows, key=lambda row: (1 if row.verdict == "ungraded" else rank[row.correct], row.uid)
    )
    wrong = sum(not row.correct and row.verdict != "ungraded" for row in rows)
    return SampleGroup(
        task=task, method=method, rows=ordered[:limit], num_wrong=wrong, num_rows=len(rows)
    )


def trace_link(page: str, uid: str, number: int) -> str:
    """Address of a decode in the viewer page, by its uid and the number of its set there."""
    place = f"&set={number}" if number else ""
    return f"{quote(page)}#uid={quote(uid, safe='')}{place}"


def report_html(content: ReportContent) -> str:
    """The page as one HTML file that asks for nothing."""
    style = (ASSETS / "style.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'"
    parts = [f"<h1>{html.escape(content.title)}</h1>"]
    parts += [f"<p>{html.escape(note)}</p>" for note in content.notes]
    parts += [_picture(picture) for picture in content.pictures[:1]]
    parts += [_table(task, group) for task, group in by_task(content.summaries)]
    if content.groups:
        parts.append("<h2>Samples, failures first</h2>")
        parts += [_samples(content, group) for group in content.groups]
    for picture in content.pictures[1:]:
        parts += [f"<h2>{html.escape(picture.title)}</h2>", _picture(picture)]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(content.title)}</title>\n<style>{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def report_markdown(content: ReportContent, *, front: str | None) -> str:
    """The same as Markdown: tables, the picture ``front`` if there is one, and failures."""
    parts = [f"# {content.title}", *content.notes, markdown_tables(content.summaries)]
    if front is not None:
        parts.append(f"![Accuracy against average steps]({front})")
    if any(group.num_wrong for group in content.groups):
        parts.append("## Failures")
    for group in content.groups:
        wrong = [row for row in group.rows if not row.correct and row.verdict != "ungraded"]
        if not wrong:
            continue
        lines = [f"### {group.task}, {group.method}: {group.num_wrong} of {group.num_rows}", ""]
        lines += ["| sample | verdict | answer | reason |", "|---|---|---|---|"]
        for row in wrong:
            link = content.link(row, group.method)
            name = f"[{row.uid}]({link})" if link else row.uid
            cells = (name, row.verdict, _markdown(row.answer or ""), _markdown(row.detail))
            lines.append(f"| {' | '.join(cells)} |")
        if len(wrong) < group.num_wrong:
            lines += ["", f"and {group.num_wrong - len(wrong)} more"]
        parts.append("\n".join(lines))
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _table(task: str, group: Sequence[MethodSummary]) -> str:
    headers, *texts = table_rows(group)
    head = "".join(f"<th scope=col>{html.escape(name)}</th>" for name in headers)
    rows = []
    for text in texts:
        first, *others = (html.escape(cell) for cell in text)
        cells = "".join(f"<td>{cell}</td>" for cell in others)
        rows.append(f"<tr><th scope=row>{first}</th>{cells}</tr>")
    return (
        f"<h2>{html.escape(task)}</h2>\n<div class=wide><table><thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{chr(10).join(rows)}\n</tbody></table></div>"
    )


def _samples(content: ReportContent, group: SampleGroup) -> str:
    rows = []
    for row in group.rows:
        grade = "none" if row.verdict == "ungraded" else ("right" if row.correct else "wrong")
        sign = {"right": "✓ right", "wrong": f"✗ {row.verdict.replace('_', ' ')}"}
        text = (
            row.completion if len(row.completion) <= MAX_TEXT else row.completion[:MAX_TEXT] + "…"
        )
        name = html.escape(row.uid)
        link = content.link(row, group.method)
        if link is not None:
            name = f'<a href="{html.escape(link)}">{name}</a>'
        answer = "" if row.answer is None else html.escape(row.answer[:200])
        rows.append(
            f'<tr><td>{name}</td><td class="{grade}">'
            f"{html.escape(sign.get(grade, 'not graded'))}</td>"
            f"<td>{answer}</td><td>{html.escape(row.detail[:300])}</td>"
            f"<td>{row.nfe}</td><td><pre>{html.escape(text)}</pre></td></tr>"
        )
    shown = "" if len(group.rows) == group.num_rows else f", {len(group.rows)} shown"
    names = ("sample", "grade", "answer", "reason", "steps", "completion")
    head = "".join(f"<th scope=col>{name}</th>" for name in names)
    return (
        f"<details><summary><b>{html.escape(group.task)}</b>, {html.escape(group.method)}: "
        f"{group.num_wrong} of {group.num_rows} wrong{shown}</summary>\n"
        f"<div class=wide><table class=samples><thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{chr(10).join(rows)}\n</tbody></table></div></details>"
    )


def _picture(picture: Picture) -> str:
    light, dark = (
        "data:image/png;base64," + base64.b64encode(data).decode()
        for data in (picture.light, picture.dark)
    )
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{html.escape(picture.title)}"></picture>'
        f"<figcaption>{html.escape(picture.title)}</figcaption></figure>"
    )


def _markdown(text: str) -> str:
    """A text inside a table cell."""
    line = " ".join(text.split())[:160]
    for character in "\\`*_[]<>|":
        line = line.replace(character, f"\\{character}")
    return line
