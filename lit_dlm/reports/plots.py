"""Plots: speed against quality, curves over steps, calibration; light and dark."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import cycler  # type: ignore[attr-defined]
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from lit_dlm.reports.summary import MethodSummary, by_task
from lit_dlm.system.files import write_atomically, write_json

Curve = Sequence[tuple[int, float]]  # (optimiser step, value), by step
MAX_CURVES = 9  # training curves of a run that are drawn
_NUMBER = re.compile(r"[-_ ]?([0-9]*\.?[0-9]+)$")


@dataclass(frozen=True)
class Theme:
    """Colours as ``#rrggbb``."""

    background: str
    text: str
    muted: str
    line: str
    mask: str  # a cell that is not written yet
    accent: str  # what was written last
    accent_text: str
    series: tuple[str, ...]  # curves and regions, told apart by colour-blind readers too


THEMES: dict[str, Theme] = {
    "light": Theme(
        background="#ffffff",
        text="#1b1c20",
        muted="#5a5d66",
        line="#d9dadf",
        mask="#dfe1e7",
        accent="#0a5bb5",
        accent_text="#ffffff",
        series=(
            # Okabe and Ito's colours, which all kinds of colour vision tell apart; grey and a dark
            # red take the places of their black and yellow, which vanish on one of the grounds.
            "#0072B2", "#D55E00", "#009E73", "#CC79A7",
            "#56B4E9", "#E69F00", "#777777", "#8B1A4A",
        ),
    ),
    "dark": Theme(
        background="#121316",
        text="#e9eaee",
        muted="#a6aab6",
        line="#343842",
        mask="#33373f",
        accent="#74b5ff",
        accent_text="#0c1420",
        series=(
            "#56B4E9", "#F0883E", "#3FC79A", "#E29BC4",
            "#8CC8F0", "#F2C14E", "#B0B4BD", "#D9667F",
        ),
    ),
}  # fmt: skip
COLOURS = THEMES["light"].series
METHODS = {
    "tracelock": 1, "threshold": 0, "blocks": 7, "entropy": 2, "confidence": 5, "margin": 3,
    "random": 6, "sequential": 4, "base": 6, "sft-gt": 2, "sft": 4, "tabom": 7, "window": 5,
    "tracerl with value": 5, "tracerl": 2, "coupled": 3,
}  # fmt: skip
"""Index of a method's colour among a theme's series, in every picture, by the beginning of its
name. Number 1 is TraceLock's alone."""
_DASHES = ("-", "--", ":", "-.")


@contextmanager
def plot_style(theme: Theme) -> Iterator[None]:
    """Sets the colours of matplotlib figures that are built, and drawn once, inside."""
    style: Any = {
        **dict.fromkeys(
            ("figure.facecolor", "savefig.facecolor", "axes.facecolor"), theme.background
        ),
        **dict.fromkeys(("xtick.color", "ytick.color", "axes.edgecolor"), theme.muted),
        **dict.fromkeys(
            ("axes.labelcolor", "axes.titlecolor", "text.color", "xtick.labelcolor",
             "ytick.labelcolor"), theme.text,
        ),
        "axes.prop_cycle": cycler(color=theme.series),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": theme.line,
        "text.parse_math": False,  # tokens may well be dollar signs
        "legend.frameon": False,
        "font.size": 10,
    }  # fmt: skip
    with mpl.rc_context(style):
        yield


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a figure to a file, in the format of its suffix."""
    write_atomically(path, figure_bytes(figure, suffix=path.suffix))


def figure_bytes(figure: Figure, *, suffix: str = ".png", dpi: int = 150) -> bytes:
    """Returns a figure as the bytes of an image file."""
    data = io.BytesIO()
    figure.savefig(data, format=suffix.removeprefix("."), dpi=dpi)
    return data.getvalue()


def tidy_axes(*axes: Axes) -> None:
    """Sets faint grid lines, and removes the frame above and on the right."""
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)


# -- methods ---------------------------------------------------------------------------------------


def family(method: str) -> str:
    """Name of a method without its trailing setting: ``threshold_09`` is a ``threshold``."""
    return _NUMBER.sub("", method) or method


def method_styles(names: Sequence[str], theme: Theme = THEMES["light"]) -> list[dict[str, Any]]:
    """Colour, line and marker of each method; variants of one differ in line and marker."""
    # The first that fits, so longer names stand before their beginnings in METHODS.
    known = [
        next((index for start, index in METHODS.items() if name.lower().startswith(start)), None)
        for name in names
    ]
    free = cycle([n for n in range(len(theme.series)) if n not in {*known, METHODS["tracelock"]}])
    indices = [next(free, 0) if index is None else index for index in known]
    styles = []
    for number, index in enumerate(indices):
        variant = indices[:number].count(index)
        colour = theme.series[index]
        line = {"color": colour, "linestyle": _DASHES[variant % len(_DASHES)]}
        inside = theme.background if variant else colour
        styles.append({**line, "marker": "os^Dv"[number % 5], "markerfacecolor": inside})
    return styles


def draw_methods(
    axis: Axes,
    group: Sequence[MethodSummary],
    families: Sequence[str],
    x: Callable[[MethodSummary], float],
    y: Callable[[MethodSummary], float] | None = None,
    theme: Theme = THEMES["light"],
) -> None:
    """Draws a line per family of methods; without ``y``, accuracies with their 95 % intervals."""
    for name, style in zip(families, method_styles(families, theme), strict=True):
        line = [one for one in group if family(one.method) == name]
        line.sort(key=lambda one: one.nfe)
        if not line:
            continue
        shares = [(one.accuracy or 0.0, *(one.interval or (0.0, 0.0))) for one in line]
        accuracies, lows, highs = 100 * np.array(shares).T
        if len(line) == 1:
            style["linestyle"] = "none"  # else the legend would promise a curve
        axis.errorbar(
            [x(one) for one in line],
            [y(one) for one in line] if y else accuracies,
            yerr=None if y else (accuracies - lows, highs - accuracies),
            label=name,
            **style,
            capsize=2,
            markersize=5,
            linewidth=1.3,
        )


def common_legend(figure: Figure, columns: int) -> None:
    """Draws one legend below all panels; a method may be missing in some of them."""
    handles: dict[str, Any] = {}
    for axis in figure.axes:
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=min(len(handles), columns)
    )


def save_themes(path: Path, draw: Callable[[Theme], Figure | None]) -> None:
    """Writes what a function draws for each theme, if anything; the dark one as ``..._dark``."""
    for name, theme in THEMES.items():
        with plot_style(theme):
            figure = draw(theme)
            if figure is not None:
                stem = path.stem if name == "light" else f"{path.stem}_{name}"
                save_figure(figure, path.with_stem(stem))


def front_figure(summaries: Sequence[MethodSummary], theme: Theme) -> Figure | None:
    """Accuracy against average steps, one panel per task; ``None`` when nothing was graded."""
    graded = [summary for summary in summaries if summary.accuracy is not None]
    if not graded:
        return None
    tasks = list(by_task(graded))
    names = list(dict.fromkeys(family(summary.method) for summary in graded))
    # Figures and not pyplot, which keeps all figures of a process until they are closed: a run
    # draws after every evaluation.
    with plot_style(theme):
        figure = Figure(figsize=(4.6 * len(tasks), 3.8), layout="constrained")
        axes = figure.subplots(1, len(tasks), squeeze=False)[0]
        for axis, (task, group) in zip(axes, tasks, strict=True):
            draw_methods(axis, group, names, lambda one: one.nfe, theme=theme)
            # Logarithmic: half the steps are worth as much from 64 as from 8.
            axis.set(title=f"{task} (n = {group[0].n})", xlabel="average steps", xscale="log")
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.xaxis.set_minor_formatter(NullFormatter())
            axis.grid(alpha=0.5)
        axes[0].set_ylabel("accuracy, %")
        common_legend(figure, 4 * len(tasks) if len(tasks) > 1 else 3)
        # Ticks and texts look their colours up when they are first drawn.
        figure.canvas.draw()
    return figure


# -- curves ----------------------------------------------------------------------------------------


def draw_curves(
    axis: Axes,
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    faint: str = "",
    colours: Sequence[str] = COLOURS,
) -> None:
    """Draws ``(x, y)`` curves by label ("" for none); one without points still takes a colour."""
    for number, (label, (x, y)) in enumerate(curves.items()):
        if len(x):
            colour, alpha = colours[number % len(colours)], 0.5 if label == faint else 1.0
            axis.plot(x, y, color=colour, label=label, linewidth=1.3, alpha=alpha)
    tidy_axes(axis)
    if all(curves):
        axis.legend(fontsize="small")


def plot_steps(curves: Mapping[str, Sequence[float]], path: Path, *, ylabel: str) -> None:
    """Draws curves over decode steps in one panel, by label; ``ylabel`` names the unit."""
    figure = Figure(figsize=(5.4, 3.6), layout="constrained")
    axis = figure.subplots()
    draw_curves(axis, {label: (range(len(y)), y) for label, y in curves.items()})
    axis.set(xlabel="decode step", ylabel=ylabel, xlim=(0, None), ylim=(0, None))
    save_figure(figure, path)


def curve_figure(curves: Mapping[str, Curve], theme: Theme) -> Figure:
    """Small panels of the first :data:`MAX_CURVES` metrics over the steps, under their names."""
    shown = list(curves.items())[:MAX_CURVES]
    columns = min(len(shown), 3)
    rows = math.ceil(len(shown) / columns)
    with plot_style(theme):
        figure = Figure(figsize=(3.6 * columns, 2.3 * rows), layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False).ravel()
        for axis in panels[len(shown) :]:
            axis.set_axis_off()
        for (name, curve), axis in zip(shown, panels, strict=False):
            x, y = zip(*curve, strict=True)
            draw_curves(axis, {"": (x, y)}, colours=theme.series)
            axis.set_title(name, fontsize="medium")
            axis.set_xlabel("step")
            axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        figure.canvas.draw()
    return figure


def read_curves(run: Path) -> dict[str, Curve]:
    """Curves of Lightning's CSV logger with two finite values or more; losses and rewards first."""
    values: defaultdict[str, dict[int, float]] = defaultdict(dict)
    # Each part of a resumed run has its own file; where they overlap, the later one counts.
    for path in sorted(run.glob("**/metrics.csv"), key=_version):
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                step = int(row.pop("step"))
                for name, text in row.items():
                    # A line has only what was logged at its step; NaN of a bad step hides nothing.
                    if name != "epoch" and text and math.isfinite(float(text)):
                        values[name][step] = float(text)
    curves = {name: sorted(points.items()) for name, points in values.items() if len(points) > 1}
    return {name: curves[name] for name in sorted(curves, key=_rank)}


def _version(path: Path) -> tuple[int, str]:
    # As a number: as text, version_10 would come before version_9, and its values would lose.
    match = re.search(r"version_(\d+)", str(path))
    return (int(match[1]) if match else -1, str(path))


def _rank(name: str) -> tuple[int, str]:
    first = ("loss", "reward", "accuracy", "correct")
    ranks = [rank for rank, word in enumerate(first) if word in name]
    return (min(ranks, default=len(first)), name)


# -- calibration -----------------------------------------------------------------------------------


def write_calibration(path: Path, curve: Mapping[str, Any], *, step: int) -> None:
    """Writes ``ece`` and, per bin, ``count``, ``prob`` and ``accuracy`` (``null`` if empty)."""
    record: dict[str, Any] = {"global_step": step, "ece": curve["ece"], "count": curve["count"]}
    # JSON has no NaN: Python would write one that other readers refuse.
    for name in ("prob", "accuracy"):
        record[name] = [None if math.isnan(value) else value for value in curve[name]]
    write_json(path, record)


def plot_calibration(curve: Mapping[str, Any], path: Path) -> None:
    """Plots the share of right proposals against the mean acceptance probability, and counts."""
    count = curve["count"]
    edges = [number / len(count) for number in range(len(count))]
    figure = Figure(figsize=(4.2, 4.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    above.plot([0, 1], [0, 1], color="#999999", linewidth=1, linestyle="--")
    filled = [number for number, here in enumerate(count) if here]
    x, y = ([curve[name][number] for number in filled] for name in ("prob", "accuracy"))
    above.plot(x, y, "o-", color=COLOURS[METHODS["tracelock"]], markersize=4, linewidth=1.3)
    title = f"calibration error {curve['ece']:.4f}"
    above.set(ylabel="share that is final", ylim=(0, 1), title=title)
    below.bar(edges, count, width=1 / len(count), align="edge", color=COLOURS[4])
    # Counts span orders of magnitude, and a logarithm alone has no place for empty bins.
    below.set(xlabel="acceptance probability", ylabel="positions", xlim=(0, 1), yscale="symlog")
    tidy_axes(above, below)
    save_figure(figure, path)


Point = Mapping[str, float]  # one RL step: step and logged values by their names

PHASES = ("rollout", "wait", "reward", "value", "old_log_prob", "train")
REWARDS = {
    "rollouts": "rollout/reward",
    "rollouts, smoothed": "rollout/reward_smoothed",
    "held-out prompts": "val/reward",
}


def write_points(points: Sequence[Point], path: Path) -> None:
    """Writes a curve as one JSON object per line, replacing the file."""
    lines = [json.dumps(dict(point), sort_keys=True) + "\n" for point in points]
    write_atomically(path, "".join(lines))


def read_points(path: Path) -> list[dict[str, Any]]:
    """Reads a curve that :func:`write_points` wrote."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def plot_run(points: Sequence[Point], path: Path) -> None:
    """Plots the reward of rollouts and of held-out prompts, and the time of every phase."""
    figure = Figure(figsize=(9.2, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    curves = {}
    for label, name in REWARDS.items():
        chosen = [point for point in points if name in point]
        curves[label] = ([point["step"] for point in chosen], [point[name] for point in chosen])
    draw_curves(left, curves, faint="rollouts")
    left.set(xlabel="RL step", ylabel="reward")
    if timed := [point for point in points if "time/train" in point]:
        _stack_phases(right, timed)
    right.set(xlabel="RL step", ylabel="seconds")
    tidy_axes(right)
    save_figure(figure, path)


def _stack_phases(axis: Axes, timed: Sequence[Point]) -> None:
    # Phases differ from run to run: without a value model there is no ``value``.
    known = set().union(*timed)
    names = [name for name in PHASES if f"time/{name}" in known]
    axis.stackplot(
        [point["step"] for point in timed],
        [[point.get(f"time/{name}", 0.0) for point in timed] for name in names],
        labels=[name.replace("_", " ") for name in names],
        colors=COLOURS[: len(names)],
        alpha=0.85,
    )
    axis.legend(fontsize="small", loc="upper right")
