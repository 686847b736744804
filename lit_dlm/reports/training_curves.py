"""Curves of training and validation from what Lightning's CSV logger wrote."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lit_dlm.reports.themes import plot_style

Curve = Sequence[tuple[int, float]]
"""(optimiser step, value), by step."""

_FIRST = ("loss", "reward", "accuracy", "correct")


def read_curves(run: Path) -> dict[str, Curve]:
    """Curves of at least two finite values by metric; losses and rewards come first.

    Each part of a run that was resumed has its own ``metrics.csv``; where they overlap, the later
    one counts.
    """
    values: dict[str, dict[int, float]] = {}
    for path in sorted(run.glob("**/metrics.csv"), key=_version):
        _read_into(path, values)
    curves = {
        name: sorted(points.items())
        for name, points in values.items()
        if len(points) > 1 and name not in ("epoch", "step")
    }
    return {name: curves[name] for name in sorted(curves, key=_rank)}


def curve_figure(curve: Curve, *, theme: str = "light") -> Figure:
    """A small panel of one metric over the steps."""
    with plot_style(theme) as colours:
        figure = Figure(figsize=(3.6, 2.3), layout="constrained")
        axis = figure.subplots()
        axis.plot(*zip(*curve, strict=True), color=colours.series[0], linewidth=1.3)
        axis.set_xlabel("step")
        axis.grid(alpha=0.5)
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        figure.canvas.draw()  # colours are looked up while the style holds
    return figure


def _read_into(path: Path, values: dict[str, dict[int, float]]) -> None:
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames and "step" not in reader.fieldnames:
            raise ValueError(f"{path}: expected a column 'step', found {reader.fieldnames}")
        for number, row in enumerate(reader, start=2):
            try:
                step = int(row["step"])
                for name, text in row.items():
                    value = float(text) if text else math.nan
                    if math.isfinite(value):
                        values.setdefault(name, {})[step] = value
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: expected numbers, got {row}") from error


def _version(path: Path) -> tuple[int, str]:
    found = re.search(r"version_(\d+)", str(path))
    return (int(found[1]) if found else -1, str(path))


def _rank(name: str) -> tuple[int, str]:
    found = [place for place, word in enumerate(_FIRST) if word in name]
    return (min(found, default=len(_FIRST)), name)
