"""Benchmark tables: Markdown for files, rich for terminals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.table import Table

from lit_dlm.reports.summary import MethodSummary

HEADERS = ("method", "accuracy [95 %]", "steps", "tokens/step", "ms/sample", "n")


def table_rows(summaries: Sequence[MethodSummary]) -> list[tuple[str, ...]]:
    """The texts of the table of a task: :data:`HEADERS`, then one row per method.

    Methods with several responses to a prompt add a last column, the largest k of pass@k.
    """
    cells = [_cells(summary) for summary in summaries]
    if all(summary.pass_at is None for summary in summaries):
        return [HEADERS, *cells]
    return [
        (*HEADERS, "pass@k"),
        *((*row, _pass_cell(summary)) for row, summary in zip(cells, summaries, strict=True)),
    ]


def _cells(summary: MethodSummary) -> tuple[str, ...]:
    return (
        summary.method,
        percent(summary.accuracy, summary.interval),
        f"{summary.nfe:.1f}",
        f"{summary.tokens_per_step:.2f}",
        f"{1000 * summary.seconds:.1f}",
        str(summary.n),
    )


def percent(share: float | None, interval: tuple[float, float] | None) -> str:
    """A share with an interval, such as ``81.2 % [79.0, 83.2]``; ``-`` where there is none."""
    if share is None or interval is None:
        return "-"
    return f"{100 * share:.1f} % [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"


def _pass_cell(summary: MethodSummary) -> str:
    if summary.pass_at is None:
        return "-"
    k, value = max(summary.pass_at.items(), key=lambda item: int(item[0]))
    return f"{100 * value:.1f} % (k = {k})"


def by_task(summaries: Sequence[MethodSummary]) -> Iterator[tuple[str, list[MethodSummary]]]:
    """Groups summaries by task, keeping their order."""
    for task, group in groupby(summaries, key=lambda summary: summary.task):
        yield task, list(group)


def markdown_tables(summaries: Sequence[MethodSummary]) -> str:
    """One Markdown table per task.

    Accuracy is in percent with its 95 % interval, over all responses (avg@k); ``steps`` are mean
    forwards of the backbone per sample.
    """
    return "\n".join(markdown_table(task, *table_rows(group)) for task, group in by_task(summaries))


def markdown_table(
    title: str, headers: Sequence[str], *rows: Sequence[str], heading: str = "###"
) -> str:
    """A Markdown table under a heading; all columns but the first stand to the right."""
    lines = [f"{heading} {title}", "", f"| {' | '.join(headers)} |"]
    lines.append("|---|" + "---:|" * (len(headers) - 1))
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def terminal_tables(summaries: Sequence[MethodSummary]) -> list[Table]:
    """One rich table per task, with the same columns."""
    tables = []
    for task, group in by_task(summaries):
        table = Table(title=task, title_justify="left", title_style="bold")
        headers, *rows = table_rows(group)
        for header in headers:
            table.add_column(header, justify="left" if header == "method" else "right")
        for row in rows:
            table.add_row(*row)
        tables.append(table)
    return tables
