"""The curve of a reinforcement learning run: rewards and where the time went, step by step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lit_dlm.reports.plots import COLOURS, draw_curves, save_figure, tidy_axes
from lit_dlm.reports.results import write_atomically

Point = Mapping[str, float]
"""One RL step: ``step`` and logged values by their names."""

PHASES = ("rollout", "wait", "reward", "value", "old_log_prob", "train")
"""Phases of an RL step in their order, as in ``time/{phase}``."""
REWARDS = {
    "rollouts": "rollout/reward",
    "rollouts, smoothed": "rollout/reward_smoothed",
    "held-out prompts": "val/reward",
}


def write_points(points: Sequence[Point], path: Path) -> None:
    """Writes a curve, one JSON object a line, in place of the file."""
    lines = [json.dumps(dict(point), sort_keys=True) + "\n" for point in points]
    write_atomically(path, "".join(lines))


def read_points(path: Path) -> list[dict[str, Any]]:
    """Reads a curve that :func:`write_points` wrote."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def plot_run(points: Sequence[Point], path: Path) -> None:
    """Reward of rollouts and of held-out prompts, and the time of every phase."""
    figure = Figure(figsize=(9.2, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    curves = {}
    for label, name in REWARDS.items():
        chosen = [point for point in points if name in point]
        curves[label] = ([point["step"] for point in chosen], [point[name] for point in chosen])
    draw_curves(left, curves, faint="rollouts")
    left.set(xlabel="RL step", ylabel="reward")
    if timed := [point for point in points if "time/train" in point]:
        known = set().union(*timed)
        names = [name for name in PHASES if f"time/{name}" in known]
        right.stackplot(
            [point["step"] for point in timed],
            [[point.get(f"time/{name}", 0.0) for point in timed] for name in names],
            labels=[name.replace("_", " ") for name in names],
            colors=COLOURS[: len(names)],
            alpha=0.85,
        )
        right.legend(fontsize="small", loc="upper right")
    right.set(xlabel="RL step", ylabel="seconds")
    tidy_axes(right)
    save_figure(figure, path)
