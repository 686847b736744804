"""Benchmark results as one record per task and method, as tables, and as the files of a run."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from lit_dlm.reports.results import ResultFolder, ResultRow
from lit_dlm.system.json_lines import parsed_json


@dataclass(frozen=True, kw_only=True)
class MethodSummary:
    """Means of one method on one task, over samples."""

    task: str
    method: str
    n: int  # samples: prompts times responses to each
    skipped: int = 0  # problems left out as too long; all else is over the others
    accuracy: float | None = None  # of the graded: share right, or mean score; avg@k
    stderr: float | None = None  # of the accuracy; prompts are independent
    interval: tuple[float, float] | None = None  # 95 %, see wilson_interval
    nfe: float  # mean forwards of the backbone per sample (average steps)
    tokens_per_step: float  # response positions filled per forward, over all samples
    useful_tokens_per_step: float  # the same, counting only tokens before the first end of text
    seconds: float  # mean decode time per sample, grading excluded
    policy_forwards: float
    policy_share: float  # of the decode time that the commit policy took
    idle_steps: float  # forwards that committed nothing
    unfinished: float  # fraction that hit the step limit with masks left
    timeouts: float
    lockstep: float | None = None
    isolation: str | None = None  # in which model-written code ran for grading, if any
    pass_at: dict[str, float] | None = None  # by k: powers of two, and the most


Columns = Mapping[str, Callable[[MethodSummary], str]]
"""Columns of a table: what returns the text of a cell, by heading."""


def pass_at_k(num_responses: int, num_right: int, k: int) -> float:
    """Unbiased chance that one of ``k`` responses is right (arXiv:2107.03374, equation 1)."""
    # The chance that all k drawn without replacement are wrong. 1 - (1 - c/n)**k would be biased:
    # it draws the same response again. The paper multiplies quotients, as binomials overflow
    # floats; those of Python are exact, and too few wrong ones for k give 0 by themselves.
    return 1.0 - math.comb(num_responses - num_right, k) / math.comb(num_responses, k)


def wilson_interval(share: float, n: float) -> tuple[float, float]:
    """95 % score interval of a share (Wilson 1927), which has a width even for 0 or 1."""
    square = 1.96**2 / n
    middle = share + square / 2
    half = math.sqrt(square * (share * (1.0 - share) + square / 4))
    low, high = (middle - half) / (1 + square), (middle + half) / (1 + square)
    return max(0.0, min(share, low)), min(1.0, max(share, high))  # rounding may exclude the share


def summarise(rows: Sequence[ResultRow]) -> MethodSummary:
    """Means over the samples (at least one) of one task and method."""

    def total(name: str) -> float:
        return sum(getattr(row, name) for row in rows)

    n, forwards, seconds = len(rows), total("nfe"), total("seconds")
    lockstep = [row.lockstep for row in rows if row.lockstep is not None]
    graded = [row for row in rows if row.verdict != "ungraded"]
    return MethodSummary(
        task=rows[0].task,
        method=rows[0].method,
        n=n,
        **(_accuracy(graded) if graded else {}),
        nfe=forwards / n,
        # Quotients of sums, not means of quotients: a response of one step would weigh as much as
        # a long one, and the speed of a run is what its steps wrote in all.
        tokens_per_step=total("response_length") / max(forwards, 1),
        useful_tokens_per_step=total("num_tokens") / max(forwards, 1),
        seconds=seconds / n,
        policy_forwards=total("policy_forwards") / n,
        policy_share=total("policy_seconds") / max(seconds, 1e-12),
        idle_steps=total("idle_steps") / n,
        unfinished=sum(row.status == "step_limit" for row in rows) / n,
        timeouts=sum(row.verdict == "timeout" for row in rows) / n,
        lockstep=sum(lockstep) / len(lockstep) if lockstep else None,
    )


def _accuracy(rows: Sequence[ResultRow]) -> dict[str, Any]:
    points = [row.points for row in rows]
    n, accuracy = len(rows), sum(points) / len(rows)
    grades: defaultdict[str, list[bool]] = defaultdict(list)
    sums: defaultdict[str, float] = defaultdict(float)
    for row, point in zip(rows, points, strict=True):
        grades[row.prompt_uid].append(row.correct)
        sums[row.prompt_uid] += point
    # Errors add up within a prompt before they are squared: responses to one prompt are right or
    # wrong together, and as independent samples they would promise too narrow an interval.
    errors = (sums[uid] - len(group) * accuracy for uid, group in grades.items())
    stderr = math.sqrt(sum(error * error for error in errors)) / n
    # This many independent responses would have the same standard error.
    spread = accuracy * (1.0 - accuracy)
    effective = spread / stderr**2 if stderr else 0.0
    return {
        "accuracy": accuracy,
        "stderr": stderr,
        # Never fewer than prompts nor more than responses: a run that is all right has no spread,
        # and chance can make the responses to a prompt disagree more than independent ones.
        "interval": wilson_interval(accuracy, min(max(effective, len(grades)), n)),
        "pass_at": _pass_at(list(grades.values())),
    }


def _pass_at(grades: Sequence[Sequence[bool]]) -> dict[str, float] | None:
    most = min(map(len, grades))  # a run that still goes on has more of some prompts than of others
    if most == 1:
        return None
    numbers = [2**power for power in range(1, most.bit_length()) if 2**power < most]
    return {
        str(k): sum(pass_at_k(len(group), sum(group), k) for group in grades) / len(grades)
        for k in [*numbers, most]
    }


def summarise_folder(folder: Path, order: Sequence[str] = ()) -> list[MethodSummary]:
    """Summaries of a ``results`` folder by task; methods as in ``order``, then the others."""
    results = ResultFolder(folder)
    # A task whose problems were skipped is easier by these: tables must say how many there were.
    skipped = results.metadata().get("skipped", {})
    methods = dict.fromkeys([*order, *(method for _, method in results.pairs())])
    rank = {method: number for number, method in enumerate(methods)}
    return [
        replace(
            summarise(rows),
            isolation=results.settings(*pair).get("isolation"),
            skipped=skipped.get(pair[0], 0),
        )
        for pair in sorted(results.pairs(), key=lambda pair: (pair[0], rank[pair[1]]))
        if (rows := results.rows(*pair))
    ]


def summarise_run(run: Path) -> list[MethodSummary]:
    """Summaries of a run folder, at least one; methods in the order of its own ``summary.json``."""
    path = run / "summary.json"
    listed = parsed_json(str(path), path.read_bytes()) if path.exists() else []
    summaries = summarise_folder(run / "results", [record["method"] for record in listed])
    if not summaries:
        raise ValueError(f"{run}: expected a run folder with results, found none")
    return summaries


def by_task(summaries: Sequence[MethodSummary]) -> Iterator[tuple[str, list[MethodSummary]]]:
    """Yields each task with its summaries, which must be next to each other."""
    for task, group in groupby(summaries, key=lambda summary: summary.task):
        yield task, list(group)


def percent(share: float | None, interval: tuple[float, float] | None) -> str:
    """A share with an interval, such as ``81.2 % [79.0, 83.2]``; ``-`` where there is none."""
    if share is None or interval is None:
        return "-"
    return f"{100 * share:.1f} % [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"


COLUMNS: Columns = {
    "method": lambda one: one.method,
    "accuracy [95 %]": lambda one: percent(one.accuracy, one.interval),
    "steps": lambda one: f"{one.nfe:.1f}",
    "tokens/step": lambda one: f"{one.tokens_per_step:.2f}",
    "ms/sample": lambda one: f"{1000 * one.seconds:.1f}",
    "n": lambda one: str(one.n),
}


def table_rows(
    summaries: Sequence[MethodSummary], columns: Columns = COLUMNS
) -> list[tuple[str, ...]]:
    """The texts of the table of a task: names of columns, then one row per method."""
    if any(one.skipped for one in summaries):
        columns = {**columns, "skipped": lambda one: str(one.skipped)}
    if any(one.pass_at is not None for one in summaries):
        columns = {**columns, "pass@k": _pass_cell}
    cells = [tuple(text_of(one) for text_of in columns.values()) for one in summaries]
    return [tuple(columns), *cells]


def _pass_cell(one: MethodSummary) -> str:
    k, value = max((one.pass_at or {}).items(), key=lambda item: int(item[0]), default=("", 0.0))
    return f"{100 * value:.1f} % (k = {k})" if k else "-"


def markdown_tables(summaries: Sequence[MethodSummary], columns: Columns = COLUMNS) -> str:
    """One Markdown table per task."""
    groups = by_task(summaries)
    return "\n".join(markdown_table(task, *table_rows(one, columns)) for task, one in groups)


def markdown_table(
    title: str, headers: Sequence[str], *rows: Sequence[str], heading: str = "###"
) -> str:
    """A Markdown table under a heading; all columns but the first are right-aligned."""
    rule = "|---|" + "---:|" * (len(headers) - 1)
    lines = [f"| {' | '.join(row)} |" for row in (headers, *rows)]
    return "\n".join([f"{heading} {title}", "", lines[0], rule, *lines[1:]]) + "\n"
