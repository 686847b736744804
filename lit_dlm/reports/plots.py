"""Speed-quality plots, curves over decode steps, and calibration."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from lit_dlm.reports.results import write_json
from lit_dlm.reports.summary import MethodSummary
from lit_dlm.reports.tables import by_task
from lit_dlm.reports.themes import plot_style, save_figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#999999")
_NUMBER = re.compile(r"[-_ ]?([0-9]*\.?[0-9]+)$")


def family(method: str) -> str:
    """Name of a method without its trailing setting: ``threshold_09`` is a ``threshold``."""
    return _NUMBER.sub("", method) or method


def plot_front(summaries: Sequence[MethodSummary], path: Path, *, theme: str = "light") -> None:
    """Accuracy against average steps, one panel per task, as a file.

    Ungraded methods are left out, and nothing is written without others.
    """
    figure = front_figure(summaries, theme=theme)
    if figure is not None:
        save_figure(figure, path)


def front_figure(summaries: Sequence[MethodSummary], *, theme: str = "light") -> Figure | None:
    """The figure of :func:`plot_front`; ``None`` when nothing was graded.

    Steps have a logarithmic axis. Methods that differ only in a trailing number are points of one
    curve; bars are 95 % intervals.
    """
    summaries = [summary for summary in summaries if summary.accuracy is not None]
    if not summaries:
        return None
    tasks = list(by_task(summaries))
    names = list(dict.fromkeys(family(summary.method) for summary in summaries))
    with plot_style(theme) as colours:
        figure = Figure(figsize=(4.6 * len(tasks), 3.8), layout="constrained")
        axes = figure.subplots(1, len(tasks), squeeze=False)
        for axis, (task, group) in zip(axes[0], tasks, strict=True):
            for number, name in enumerate(names):
                points = sorted(
                    (s for s in group if family(s.method) == name), key=lambda summary: summary.nfe
                )
                if points:
                    draw_shares(
                        axis,
                        [point.nfe for point in points],
                        points,
                        label=name,
                        linestyle="-" if len(points) > 1 else "none",
                        color=colours.series[number % len(colours.series)],
                        marker="os^Dv"[number % 5],
                    )
            axis.set(title=f"{task} (n = {group[0].n})", xlabel="average steps", xscale="log")
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.xaxis.set_minor_formatter(NullFormatter())
            axis.grid(alpha=0.5)
        axes[0][0].set_ylabel("accuracy, %")
        handles: dict[str, Any] = {}
        for axis in axes[0]:  # a method may lack in the first task
            handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
        figure.legend(
            handles.values(),
            handles,
            loc="outside lower center",
            ncols=min(len(handles), 4 * len(tasks) if len(tasks) > 1 else 3),
        )
        # Colours that are not yet settled are looked up while the style holds.
        figure.canvas.draw()
    return figure


def tidy_axes(*axes: Axes) -> None:
    """Faint grid lines, and no frame above and on the right."""
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)


def plot_steps(curves: Mapping[str, Sequence[float]], path: Path, *, ylabel: str) -> None:
    """Curves over decode steps in one panel, by label; ``ylabel`` names the values' unit."""
    figure = Figure(figsize=(5.4, 3.6), layout="constrained")
    axis = figure.subplots()
    draw_curves(axis, {label: (range(len(y)), y) for label, y in curves.items()})
    axis.set(xlabel="decode step", ylabel=ylabel, xlim=(0, None), ylim=(0, None))
    save_figure(figure, path)


def write_calibration(path: Path, curve: Mapping[str, Any], *, step: int) -> None:
    """Writes a curve as JSON; empty bins hold ``null``.

    It has ``ece`` (a number), and ``prob``, ``accuracy`` and ``count`` (one value per bin).
    """
    record: dict[str, Any] = {"global_step": step, "ece": curve["ece"], "count": curve["count"]}
    for name in ("prob", "accuracy"):
        record[name] = [None if math.isnan(value) else value for value in curve[name]]
    write_json(path, record)


def plot_calibration(curve: Mapping[str, Any], path: Path) -> None:
    """Share of right proposals against the mean acceptance probability, and how many there are."""
    count = curve["count"]
    edges = [number / len(count) for number in range(len(count))]
    figure = Figure(figsize=(4.2, 4.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    above.plot([0, 1], [0, 1], color="#999999", linewidth=1, linestyle="--")
    points = [
        (prob, right)
        for prob, right, number in zip(curve["prob"], curve["accuracy"], count, strict=True)
        if number
    ]
    if points:
        above.plot(*zip(*points, strict=True), "o-", color="#0072B2", markersize=4, linewidth=1.3)
    above.set(
        ylabel="share that is final", ylim=(0, 1), title=f"calibration error {curve['ece']:.4f}"
    )
    below.bar(edges, count, width=1 / len(count), align="edge", color="#56B4E9")
    below.set(xlabel="acceptance probability", ylabel="positions", xlim=(0, 1), yscale="symlog")
    tidy_axes(above, below)
    save_figure(figure, path)


def draw_shares(
    axis: Axes, x: Sequence[float], line: Sequence[MethodSummary], **style: Any
) -> None:
    """Accuracies of graded methods in percent, with their 95 % intervals."""
    shares = [one.accuracy or 0.0 for one in line]
    intervals = [one.interval or (0.0, 0.0) for one in line]
    bars = [
        [100 * (share - low) for share, (low, _) in zip(shares, intervals, strict=True)],
        [100 * (high - share) for share, (_, high) in zip(shares, intervals, strict=True)],
    ]
    values = [100 * share for share in shares]
    axis.errorbar(x, values, yerr=bars, capsize=2, markersize=5, linewidth=1.3, **style)


def draw_curves(
    axis: Axes,
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    faint: str = "",
) -> None:
    """Curves as ``(x, y)`` by label, with a legend; a curve without points keeps its colour."""
    for number, (label, (x, y)) in enumerate(curves.items()):
        if len(x):
            colour, alpha = COLOURS[number % len(COLOURS)], 0.5 if label == faint else 1.0
            axis.plot(x, y, color=colour, label=label, linewidth=1.3, alpha=alpha)
    tidy_axes(axis)
    axis.legend(fontsize="small")
