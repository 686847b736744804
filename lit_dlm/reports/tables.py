"""Benchmark tables: Markdown for files, rich for terminals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.table import Table

from lit_dlm.reports.summary import MethodSummary

HEADERS = ("method", "accuracy", "steps", "tokens/step", "ms/sample", "n")


def table_cells(summary: MethodSummary) -> tuple[str, ...]:
    """The texts of a table row, as :data:`HEADERS` names them."""
    accuracy = "-"
    if summary.accuracy is not None and summary.stderr is not None:
        accuracy = f"{100 * summary.accuracy:.1f} ± {100 * summary.stderr:.1f} %"
    return (
        summary.method,
        accuracy,
        f"{summary.nfe:.1f}",
        f"{summary.tokens_per_step:.2f}",
        f"{1000 * summary.seconds:.1f}",
        str(summary.n),
    )


def by_task(summaries: Sequence[MethodSummary]) -> Iterator[tuple[str, list[MethodSummary]]]:
    """Groups summaries by task, keeping their order."""
    for task, group in groupby(summaries, key=lambda summary: summary.task):
        yield task, list(group)


def markdown_tables(summaries: Sequence[MethodSummary]) -> str:
    """One Markdown table per task.

    Args:
        summaries: in the order wanted.

    Returns:
        Markdown text. Accuracy is in percent with its standard error; ``steps`` are mean forwards
        of the backbone per sample.
    """
    parts = []
    for task, group in by_task(summaries):
        lines = [f"### {task}", "", f"| {' | '.join(HEADERS)} |", "|---|" + "---:|" * 5]
        lines += [f"| {' | '.join(table_cells(summary))} |" for summary in group]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def terminal_tables(summaries: Sequence[MethodSummary]) -> list[Table]:
    """One rich table per task, with the same columns."""
    tables = []
    for task, group in by_task(summaries):
        table = Table(title=task, title_justify="left", title_style="bold")
        for header in HEADERS:
            table.add_column(header, justify="left" if header == "method" else "right")
        for summary in group:
            table.add_row(*table_cells(summary))
        tables.append(table)
    return tables
