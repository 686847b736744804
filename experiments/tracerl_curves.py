"""Reward curves of reinforcement learning objectives on the embedded model, decoded too fast.

With everything of probability 0.6 committed at once the embedded model takes six to seven steps for
a word problem instead of ten, and is right in half of them instead of four fifths. Each objective
trains an adapter from there, on rollouts drawn at temperature 1: the rollout's states (TraceRL),
with and without a value model, random states and their complements, and random states alone (arXiv
2509.06949). All share prompts, seeds, learning rate and RL steps, and have about as many training
rows per response; only the states and advantages differ.

A run that is complete under ``--run_dir`` is not repeated, so the arms may be run one by one or
side by side (``--methods trace --seeds 0``); a call that names them all reports and draws what
there is. The reward is the share of right answers among held-out problems, decoded with the same
threshold, greedily and as rollouts are.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chain import EXP, call, problems, seed_flags
from matplotlib.figure import Figure

from lit_dlm.ops.files import write_atomically
from lit_dlm.reports.plots import Theme, method_styles, read_points, save_themes, tidy_axes

METHODS = {
    "trace": "TraceRL",
    "value": "TraceRL with value",
    "coupled": "coupled",
    "random": "random masking",
}
"""Arms and their names in the plot."""

PANELS = {
    "val/reward": "held-out reward, greedy",
    "val/rollout/reward": "held-out reward, temperature 1",
    "val/num_steps": "steps of a greedy decode",
}
"""Values that are drawn, and what they are called."""


def main() -> None:
    """Runs what is missing, then reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run_dir", type=Path, default=Path("runs/tracerl_curves"))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=12, help="RL steps")
    parser.add_argument("--plot", type=Path, help="draw the curves to this file")
    parser.add_argument("--only_report", action="store_true", help="train nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    curves: dict[str, list[list[dict[str, Any]]]] = {}
    for seed, method in itertools.product(options.seeds, options.methods):
        folder = options.run_dir / f"{method}-{seed}"
        if not options.only_report:
            run(method, seed, folder, options.steps)
        if (folder / "cpu_seconds").exists():
            points = read_points(folder / "reward_curve.jsonl")
            points[-1]["cpu_seconds"] = float((folder / "cpu_seconds").read_text())
            curves.setdefault(METHODS[method], []).append(points)
    if options.plot is not None and curves:
        plot_runs(curves, options.plot)
    for name, values in summary(curves).items():
        print(name, "  ".join(f"{key} {value:.4g}" for key, value in values.items()))


def run(method: str, seed: int, folder: Path, steps: int) -> None:
    """Trains one arm; notes its processor time, since wall time depends on neighbours."""
    done = folder / "done"
    if done.exists():
        return
    suffix = "" if method == "trace" else f"_{method}"
    curve = [{"class_path": "RewardCurve", "init_args": {"folder": str(folder)}}]
    began = time.process_time()
    call(
        done,
        *("fit", "--config", EXP / f"tracerl_tiny{suffix}.yaml", *seed_flags(seed)),
        *("--run_dir", folder, "--trainer.max_epochs", steps),
        *("--trainer.callbacks", json.dumps(curve), "--trainer.enable_checkpointing", "false"),
        *("--model.val_method", "[evaluation, rollout]"),
        *("--data.tasks", problems("WordProblems", "train", 400, seed=seed)),
    )
    write_atomically(folder / "cpu_seconds", str(time.process_time() - began))


def plot_runs(runs: dict[str, list[list[dict[str, Any]]]], path: Path) -> None:
    """Mean curves of methods over their seeds, with one standard error, a panel of each value."""

    def figure(theme: Theme) -> Figure:
        drawn = Figure(figsize=(1.2 + 4.3 * len(PANELS), 3.8), layout="constrained")
        axes = drawn.subplots(1, len(PANELS), squeeze=False)
        for axis, (name, title) in zip(axes[0], PANELS.items(), strict=True):
            for (label, curves), style in zip(
                runs.items(), method_styles(list(runs), theme), strict=True
            ):
                tables = [{p["step"]: p[name] for p in curve if name in p} for curve in curves]
                steps = sorted(set.intersection(*(set(table) for table in tables)))
                found = np.array([[table[step] for step in steps] for table in tables])
                mean, shown = found.mean(0), f"{label} (n = {len(curves)})"
                look = {key: style[key] for key in ("color", "linestyle")}
                axis.plot(steps, mean, label=shown, linewidth=1.5, **look)
                if len(curves) > 1:
                    error = found.std(0, ddof=1) / np.sqrt(len(curves))
                    low, high = mean - error, mean + error
                    axis.fill_between(steps, low, high, color=style["color"], alpha=0.18)
            axis.set(xlabel="RL step", ylabel=title)
            tidy_axes(axis)
        axes[0, 0].legend(fontsize="small")
        return drawn

    save_themes(path, figure)


def summary(curves: dict[str, list[list[dict[str, Any]]]]) -> dict[str, dict[str, float]]:
    """Where each arm began and ended.

    Args:
        curves: by label, the curves of its seeds.

    Returns:
        By label and value of :data:`PANELS`: ``start``, ``end`` and ``best`` (means over seeds),
        and of rewards the ``rise`` with its standard error (``stderr``); ``seeds``, and
        ``cpu_seconds`` of a run. The error adds those over prompts and over seeds. All seeds share
        the prompts, so more seeds make only the second one smaller, and both ends are taken for
        independent though they are not: it is rather too large.
    """
    report = {}
    for label, seeds in curves.items():
        found = {"seeds": float(len(seeds))}
        for name in PANELS:
            scored = [[point for point in points if name in point] for points in seeds]
            ends = [points[-1][name] for points in scored]
            start, end = statistics.mean(p[0][name] for p in scored), statistics.mean(ends)
            found |= {f"{name}/start": start, f"{name}/end": end}
            if name.endswith("reward"):
                of_prompts = [
                    points[at][f"{name}_stderr"] ** 2 for points in scored for at in (0, -1)
                ]
                of_seeds = statistics.variance(ends) / len(ends) if len(ends) > 1 else 0.0
                best = statistics.mean(max(p[name] for p in points) for points in scored)
                found |= {
                    f"{name}/best": best,
                    f"{name}/rise": end - start,
                    f"{name}/stderr": math.sqrt(2 * statistics.mean(of_prompts) + of_seeds),
                }
        found["cpu_seconds"] = statistics.mean(p[-1].get("cpu_seconds", 0.0) for p in seeds)
        report[label] = found
    return report


if __name__ == "__main__":
    main()
