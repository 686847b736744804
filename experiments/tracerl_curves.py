"""Reward curves of reinforcement learning objectives on the embedded model, decoded too fast.

With everything of probability 0.6 committed at once the embedded model takes six to seven steps for
a word problem instead of ten, and is right in half of them instead of four fifths. Each objective
trains an adapter from there, on rollouts drawn at temperature 1: the rollout's states (TraceRL),
with and without a value model, random states and their complements, and random states alone (arXiv
2509.06949). All share prompts, seeds, learning rate and RL steps, and have about as many training
rows per response; only the states and advantages differ.

A run that is complete under ``--run_dir`` is not repeated, so the arms may be run one by one or
side by side (``--methods trace --seeds 0``); a call that names them all reports and draws what
there is. The reward is the share of right answers among held-out problems of a list of their own
(``--val_seed``), decoded greedily with the same threshold.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from matplotlib.figure import Figure

from lit_dlm.backbones import HFBackbone, LoRASettings
from lit_dlm.callbacks.reward_curve import RewardCurve
from lit_dlm.datamodules.rollouts import RolloutDataModule
from lit_dlm.decoding import Decoder, DecodeSettings, NoQuota, Sampler, ThresholdPolicy
from lit_dlm.losses.corruption import RandomMasking, TraceMasking
from lit_dlm.losses.states import Corruption
from lit_dlm.losses.views import CoupledMasking
from lit_dlm.reports.plots import COLOURS, save_figure, tidy_axes
from lit_dlm.reports.reward_curve import read_points, write_points
from lit_dlm.rewards import Graded, MeanCorrectnessFilter
from lit_dlm.rl.module import TraceRLModule
from lit_dlm.rl.settings import ValueObjective
from lit_dlm.toy.word_problems import WordProblems

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
    parser.add_argument("--prompts", type=int, default=64, help="of an RL step")
    parser.add_argument("--responses", type=int, default=8, help="to each prompt")
    parser.add_argument("--val_prompts", type=int, default=500)
    parser.add_argument("--val_seed", type=int, default=1, help="of the held-out problems")
    parser.add_argument("--val_every", type=int, default=3)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--value_lr", type=float, default=1e-3)
    parser.add_argument("--temperature", type=float, default=1.0, help="of rollouts")
    parser.add_argument("--batch_size", type=int, default=64, help="items per update")
    parser.add_argument("--threshold", type=float, default=0.6, help="of committing a token")
    parser.add_argument("--plot", type=Path, help="draw the curves to this file")
    parser.add_argument("--only_report", action="store_true", help="train nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    curves: dict[str, list[list[dict[str, Any]]]] = {}
    for seed in options.seeds:
        for method in options.methods:
            folder = options.run_dir / f"{method}-{seed}"
            path = folder / "reward_curve.jsonl"
            if not options.only_report and not _is_complete(path, options.steps):
                run(method, seed, folder, options)
            if _is_complete(path, options.steps):
                curves.setdefault(METHODS[method], []).append(read_points(path))
    report = summary(curves)
    if options.plot is not None and curves:
        plot_runs(curves, options.plot)
    if options.json:
        print(json.dumps(report))
        return
    for name, values in report.items():
        print(name, "  ".join(f"{key} {value:.4g}" for key, value in values.items()))


def plot_runs(runs: dict[str, list[list[dict[str, Any]]]], path: Path) -> None:
    """Mean curves of methods over their seeds, with one standard error, a panel of each value."""
    figure = Figure(figsize=(1.2 + 4.3 * len(PANELS), 3.8), layout="constrained")
    axes = figure.subplots(1, len(PANELS), squeeze=False)
    for axis, (name, title) in zip(axes[0], PANELS.items(), strict=True):
        for number, (label, curves) in enumerate(runs.items()):
            colour = COLOURS[number % len(COLOURS)]
            tables = [{p["step"]: p[name] for p in curve if name in p} for curve in curves]
            steps = sorted(set.intersection(*(set(table) for table in tables)))
            found = np.array([[table[step] for step in steps] for table in tables])
            mean, shown = found.mean(0), f"{label} (n = {len(curves)})"
            axis.plot(steps, mean, color=colour, label=shown, linewidth=1.5)
            if len(curves) > 1:
                error = found.std(0, ddof=1) / np.sqrt(len(curves))
                axis.fill_between(steps, mean - error, mean + error, color=colour, alpha=0.18)
        axis.set(xlabel="RL step", ylabel=title)
        tidy_axes(axis)
    axes[0, 0].legend(fontsize="small")
    save_figure(figure, path)


def run(method: str, seed: int, folder: Path, options: argparse.Namespace) -> None:
    """Trains one arm.

    Args:
        method: a key of :data:`METHODS`.
        seed: of rollouts, states and prompts.
        folder: receives the curve.
        options: of the command line.
    """
    seed_everything(seed, verbose=False)
    corruption: Corruption = TraceMasking(padding="replayed")
    if method == "coupled":
        corruption = CoupledMasking(pairs=3)
    elif method == "random":
        corruption = RandomMasking(min_t=0.1, max_t=0.9, copies=6)
    lora = LoRASettings(rank=8, alpha=16, targets="all")

    def decoder(temperature: float) -> Decoder:
        return Decoder(
            policy=ThresholdPolicy(options.threshold),
            quota=NoQuota(),
            sampler=Sampler(temperature=temperature, score_on="raw"),
            settings=DecodeSettings(eos_rule="fill"),
        )

    module = TraceRLModule(
        HFBackbone("tiny", lora=lora),
        tokenizer="tiny",
        decoders={"rollout": decoder(options.temperature), "evaluation": decoder(0.0)},
        method="rollout",
        val_method=["evaluation", "rollout"],
        corruption=corruption,
        value=ValueObjective(lora=lora, lr=options.value_lr) if method == "value" else None,
        seed=seed,
        optimizer=lambda params: torch.optim.AdamW(params, lr=options.lr, weight_decay=0.0),
    )
    data = RolloutDataModule(
        [WordProblems("train", num_examples=400, seed=seed)],
        rewards=[Graded()],
        val_tasks=[WordProblems("test", num_examples=options.val_prompts, seed=options.val_seed)],
        prompts_per_step=options.prompts,
        responses_per_prompt=options.responses,
        response_length=32,
        rollout_batch_size=96,
        batch_size=options.batch_size,
        filters=[MeanCorrectnessFilter(0.05, 0.95)],
        seed=seed,
    )
    curve = RewardCurve(str(folder))
    Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=options.steps,
        check_val_every_n_epoch=options.val_every,
        num_sanity_val_steps=-1,
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        callbacks=[curve, _Clock(curve)],
    ).fit(module, data)
    write_points(curve.points, folder / "reward_curve.jsonl")


class _Clock(Callback):
    """Notes the processor time used so far with every RL step: wall time depends on neighbours."""

    def __init__(self, curve: RewardCurve) -> None:
        self.curve = curve
        self.began = time.process_time()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.curve.points[-1]["cpu_seconds"] = time.process_time() - self.began


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


def _is_complete(path: Path, steps: int) -> bool:
    return path.is_file() and read_points(path)[-1]["step"] >= steps


if __name__ == "__main__":
    main()
