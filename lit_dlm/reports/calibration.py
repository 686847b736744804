"""Calibration of acceptance probabilities: a file and a picture."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

from lit_dlm.reports.results import write_atomically


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

    Args:
        curve: as for :func:`write_calibration`.
        path: file to write; the suffix gives the format.
    """
    count = curve["count"]
    edges = [number / len(count) for number in range(len(count))]
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(4.2, 4.6), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
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
    for axis in (above, below):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{os.getpid()}-{path.name}")
    figure.savefig(draft, dpi=150)
    plt.close(figure)
    draft.replace(path)
