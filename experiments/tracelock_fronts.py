r"""Accuracy-steps fronts over several seeds: does the learned policy dominate the threshold?

    python experiments/tracelock_fronts.py runs/seed1/sweep runs/seed2/sweep runs/seed3/sweep \
        --picture fronts.png

Every folder is the sweep of one seed: other traces, another policy, other problems, the same
methods (``configs/exp/sweep_tiny.yaml``). Accuracies and steps are means over the seeds. Methods
are compared on the same problems: the standard error of a difference is that of the paired
differences. For every threshold the best learned point with at most as many steps is shown, and at
the end the learned point with the fewest steps whose accuracy is within one standard error of one
token per step.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lit_dlm.reports.plots import family, plot_front
from lit_dlm.reports.results import ResultFolder, ResultRow
from lit_dlm.reports.summary import MethodSummary, summarise, wilson_interval


@dataclass(frozen=True, kw_only=True)
class Point:
    """One method on one task, over all seeds."""

    method: str
    accuracy: float
    stderr: float
    """Of the mean over all problems of all seeds, ``sqrt(sum p (1 - p) / n) / seeds``."""
    seed_stdev: float
    """Spread of the seeds' accuracies."""
    steps: float
    seconds: float
    policy_share: float


@dataclass(frozen=True, kw_only=True)
class Gap:
    """A learned point against another one, on the same problems."""

    method: str
    learned: str
    points: float
    """Accuracy of the learned point minus that of the other, in percentage points."""
    stderr: float
    steps_ratio: float


class Task:
    """Results of one task: rows by method and seed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows: dict[str, list[list[ResultRow]]] = {}

    def common(self, seeds: int) -> list[str]:
        """Methods that every seed has."""
        return [method for method, rows in self.rows.items() if len(rows) == seeds]

    def point(self, method: str) -> tuple[Point, MethodSummary]:
        """Means over the seeds, and the same as a summary that can be drawn."""
        found = [summarise(rows) for rows in self.rows[method]]
        accuracies = [one.accuracy or 0.0 for one in found]
        stderr = math.sqrt(sum((one.stderr or 0.0) ** 2 for one in found)) / len(found)
        point = Point(
            method=method,
            accuracy=statistics.mean(accuracies),
            stderr=stderr,
            seed_stdev=statistics.stdev(accuracies) if len(found) > 1 else 0.0,
            steps=statistics.mean(one.nfe for one in found),
            seconds=statistics.mean(one.seconds for one in found),
            policy_share=statistics.mean(one.policy_share for one in found),
        )
        total = sum(one.n for one in found)
        drawn = replace(
            found[0],
            method=method,
            n=total,
            accuracy=point.accuracy,
            interval=wilson_interval(point.accuracy, total),
            nfe=point.steps,
        )
        return point, drawn

    def gap(self, method: str, learned: str, points: dict[str, Point]) -> Gap:
        """The paired difference of two methods."""
        differences: list[int] = []
        for one, other in zip(self.rows[method], self.rows[learned], strict=True):
            if [row.uid for row in one] != [row.uid for row in other]:
                raise ValueError(
                    f"{self.name}: {method} and {learned} were run on different problems"
                )
            differences += [
                int(b.correct) - int(a.correct) for a, b in zip(one, other, strict=True)
            ]
        spread = statistics.stdev(differences) / math.sqrt(len(differences))
        return Gap(
            method=method,
            learned=learned,
            points=100.0 * statistics.mean(differences),
            stderr=100.0 * spread,
            steps_ratio=points[learned].steps / points[method].steps,
        )


def read(folders: Sequence[Path]) -> dict[str, Task]:
    """Results of all seeds by task."""
    tasks: dict[str, Task] = {}
    for folder in folders:
        results = ResultFolder(folder / "results")
        for name, method in results.pairs():
            rows = results.rows(name, method)
            if rows:
                task = tasks.setdefault(name, Task(name))
                task.rows.setdefault(method, []).append(rows)
    if not tasks:
        raise ValueError(f"{', '.join(map(str, folders))}: no results found")
    return tasks


def best_within(points: Sequence[Point], steps: float) -> Point | None:
    """The most accurate point of at most so many steps."""
    within = [point for point in points if point.steps <= steps]
    return max(within, key=lambda point: point.accuracy) if within else None


def main() -> None:
    """Prints tables in Markdown and draws the fronts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="one folder with results/ per seed")
    parser.add_argument("--learned", default="tracelock", help="name of the learned family")
    parser.add_argument("--reference", default="threshold", help="name of the family to beat")
    parser.add_argument("--baseline", default="entropy", help="one token per step")
    parser.add_argument("--picture", type=Path, help="where the plot goes")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    report: dict[str, object] = {}
    drawn: list[MethodSummary] = []
    for name, task in read(options.runs).items():
        found = {method: task.point(method) for method in task.common(len(options.runs))}
        points = {method: point for method, (point, _) in found.items()}
        order = sorted(points.values(), key=lambda point: (family(point.method), point.steps))
        drawn += [found[point.method][1] for point in order]
        learned = [p for p in order if family(p.method) == options.learned]
        others = [p for p in order if family(p.method) == options.reference]
        gaps = [
            task.gap(other.method, best.method, points)
            for other in others
            if (best := best_within(learned, other.steps)) is not None
        ]
        to_baseline = [task.gap(options.baseline, point.method, points) for point in learned]
        equal = [gap for gap in to_baseline if gap.points >= -gap.stderr]
        report[name] = {
            "points": [asdict(point) for point in order],
            "gaps": [asdict(gap) for gap in gaps],
            "equal_to_baseline": asdict(min(equal, key=lambda gap: gap.steps_ratio))
            if equal
            else None,
        }
        if not options.json:
            _print(name, order, gaps, equal, len(options.runs))
    if options.picture is not None:
        plot_front(drawn, options.picture)
    if options.json:
        print(json.dumps(report))


def _print(
    name: str, points: Sequence[Point], gaps: Sequence[Gap], equal: Sequence[Gap], seeds: int
) -> None:
    print(f"### {name}, {seeds} seeds\n")
    print("| method | accuracy | spread of the seeds | steps | policy's share |")
    print("|---|---:|---:|---:|---:|")
    for p in points:
        print(
            f"| {p.method} | {100 * p.accuracy:.1f} ± {100 * p.stderr:.1f} % | "
            f"{100 * p.seed_stdev:.1f} | {p.steps:.2f} | {100 * p.policy_share:.1f} % |"
        )
    print("\n| threshold point | best learned point of no more steps | gain, points | steps |")
    print("|---|---|---:|---:|")
    for gap in gaps:
        print(
            f"| {gap.method} | {gap.learned} | {gap.points:+.1f} ± {gap.stderr:.1f} | "
            f"{100 * gap.steps_ratio:.0f} % |"
        )
    if equal:
        gap = min(equal, key=lambda one: one.steps_ratio)
        print(
            f"\nWithin one standard error of {gap.method}: {gap.learned} "
            f"({gap.points:+.1f} ± {gap.stderr:.1f} points) with "
            f"{100 * gap.steps_ratio:.1f} % of its steps.\n"
        )


if __name__ == "__main__":
    main()
