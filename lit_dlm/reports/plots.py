"""Speed-quality plots."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from lit_dlm.reports.summary import MethodSummary
from lit_dlm.reports.tables import by_task

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#999999")
_NUMBER = re.compile(r"[-_ ]?([0-9]*\.?[0-9]+)$")


def family(method: str) -> str:
    """Name of a method without its trailing setting: ``threshold-0.9`` is a ``threshold``."""
    return _NUMBER.sub("", method) or method


def plot_front(summaries: Sequence[MethodSummary], path: Path) -> None:
    """Accuracy against average steps, one panel per task.

    Methods that differ only in a trailing number are points of one curve. Bars are one standard
    error.

    Args:
        summaries: what to draw; ungraded ones are left out, and nothing is written without others.
        path: file to write; the suffix gives the format.
    """
    summaries = [summary for summary in summaries if summary.accuracy is not None]
    if not summaries:
        return
    tasks = list(by_task(summaries))
    names = list(dict.fromkeys(family(summary.method) for summary in summaries))
    colour = {name: _COLOURS[number % len(_COLOURS)] for number, name in enumerate(names)}
    figure, axes = plt.subplots(
        1, len(tasks), figsize=(4.6 * len(tasks), 3.8), squeeze=False, layout="constrained"
    )
    for axis, (task, group) in zip(axes[0], tasks, strict=True):
        for name in names:
            points = sorted(
                (s for s in group if family(s.method) == name), key=lambda summary: summary.nfe
            )
            if points:
                _draw_curve(axis, points, name, colour[name])
        axis.set(title=f"{task} (n = {group[0].n})", xlabel="average steps", xlim=(0, None))
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("accuracy, %")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 7))
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{os.getpid()}-{path.name}")
    figure.savefig(draft, dpi=150)
    plt.close(figure)
    draft.replace(path)


def plot_steps(curves: Mapping[str, Sequence[float]], path: Path, *, ylabel: str) -> None:
    """Curves over decode steps in one panel.

    Args:
        curves: values of each step by label, in the order wanted.
        path: file to write; the suffix gives the format.
        ylabel: what the values are, with their unit.
    """
    figure, axis = plt.subplots(figsize=(5.4, 3.6), layout="constrained")
    for number, (label, values) in enumerate(curves.items()):
        axis.plot(values, color=_COLOURS[number % len(_COLOURS)], label=label, linewidth=1.3)
    axis.set(xlabel="decode step", ylabel=ylabel, xlim=(0, None), ylim=(0, None))
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{os.getpid()}-{path.name}")
    figure.savefig(draft, dpi=150)
    plt.close(figure)
    draft.replace(path)


def _draw_curve(axis: Axes, points: list[MethodSummary], name: str, colour: str) -> None:
    axis.errorbar(
        [point.nfe for point in points],
        [100 * (point.accuracy or 0.0) for point in points],
        yerr=[100 * (point.stderr or 0.0) for point in points],
        fmt="o-" if len(points) > 1 else "o",
        color=colour,
        label=name,
        capsize=2,
        markersize=5,
        linewidth=1.3,
    )
