"""Calibration of acceptance probabilities: a file and a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lit_dlm.reports.plots import tidy_axes
from lit_dlm.reports.results import write_atomically
from lit_dlm.reports.themes import save_figure


def write_calibration(path: Path, curve: Mapping[str, Any], *, step: int) -> None:
    """Writes a curve as JSON; empty bins hold ``null``.

    Args:
        path: file to write.
        curve: ``ece`` (a number), and ``prob``, ``accuracy`` and ``count`` (one value per bin).
        step: optimiser steps done.
    """
    record: dict[str, Any] = {"global_step": step, "ece": curve["ece"], "count": curve["count"]}
    for name in ("prob", "accuracy"):
        record[name] = [None if math.isnan(value) else value for value in curve[name]]
    write_atomically(path, json.dumps(record, indent=2) + "\n")


def plot_calibration(curve: Mapping[str, Any], path: Path) -> None:
    """Share of right proposals against the mean acceptance probability, and how many there are.

    The curve is that of :func:`write_calibration`.
    """
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
