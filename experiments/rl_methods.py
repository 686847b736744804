"""TraceRL on the embedded model: larger rates, a value model, other states and other losses.

Every arm starts from the embedded model, decoded too fast for it (everything of probability 0.6 is
committed), and trains an adapter on the same prompts with the same rewards and seeds: 12 RL steps
of ``exp/*_tiny``, with about as many training rows and updates in each. ``dpo`` trains on pairs of
right and wrong decodes of the untrained model instead, from as many responses as the others roll
out, with about as many updates. ``offline`` is TraceRL on the same decodes, from a file. All
decode one held-out list greedily with that threshold.

Parts that are on disk are not made again, so a killed run resumes; ``--only-report`` reports what
is there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chain import BARE, call, points, problems, seed_flags, table
from numpy.typing import NDArray

from lit_dlm import cli
from lit_dlm.reports.results import ResultFolder
from lit_dlm.system.files import write_atomically

RATE = "--model.optimizer.init_args.lr"

METHODS: dict[str, tuple[Any, ...]] = {
    "tracerl": ("TraceRL", "tracerl_tiny"),
    "tracerl-2": ("TraceRL, twice the rate", "tracerl_tiny", RATE, 1e-3),
    "tracerl-4": ("TraceRL, four times the rate", "tracerl_tiny", RATE, 2e-3),
    "value": ("with value model", "tracerl_tiny", "--config", "method/value_tiny"),
    "value-2": (
        "with value model, twice the rate",
        "tracerl_tiny",
        "--config",
        "method/value_tiny",
        RATE,
        1e-3,
    ),
    "value-4": (
        "with value model, four times the rate",
        "tracerl_tiny",
        "--config",
        "method/value_tiny",
        RATE,
        2e-3,
    ),
    "coupled": ("coupled states", "tracerl_tiny", "--config", "method/coupled_tiny"),
    "random": ("random states", "tracerl_tiny", "--config", "method/random_tiny"),
    "wd1": ("wd1", "tracerl_tiny", "--config", "method/wd1"),
    "espo": ("ESPO", "tracerl_tiny", "--config", "method/espo"),
    "spg": ("SPG", "tracerl_tiny", "--config", "method/spg"),
    "dpo": ("VRPO (DPO)", "dpo_tiny"),
    "offline": ("TraceRL on decodes of the untrained model", "tracerl_tiny"),
}
"""Arms: name in the table, experiment and its flags."""

THRESHOLD = 0.6
LINE = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75)
"""Thresholds of the untrained model's front; ``THRESHOLD`` is that of the trained arms."""


def main() -> None:
    """Runs what is missing, then reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/rl_methods"))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--only-report", action="store_true", help="train nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.only_report:
        evaluate(options.out / "base", None)
        for seed, method in itertools.product(options.seeds, options.methods):
            train(options, method, seed)
            folder = options.out / f"{method}-{seed}"
            evaluate(folder, folder / "adapter")
    kept = gathered(options)
    write_atomically(options.out / "rl_methods.json", json.dumps(kept, indent=1) + "\n")
    print(markdown(kept))


def train(options: argparse.Namespace, method: str, seed: int) -> None:
    """Trains one arm."""
    folder = options.out / f"{method}-{seed}"
    costs = folder / "cpu_seconds"
    tasks = ["--data.tasks", problems("WordProblems", "train", 400, seed=seed)]
    flags = [*seed_flags(seed), "--run_dir", folder, "--model.export_dir", folder / "adapter"]
    flags += BARE
    if method in ("dpo", "offline"):
        call(
            folder / "decoded",
            *("predict", "--config", "exp/distill_tiny", "--config", "method/pairs"),
            *("--run_dir", folder),
            *("--seed_everything", seed, "--model.seed", seed, *tasks),
            costs=costs,
        )
    if method == "dpo":
        flags += ["--trainer.max_steps", 150]  # about as many as the updates of the others
    else:
        flags += ["--trainer.max_epochs", 12, "--trainer.limit_val_batches", 0]
        flags += ["--trainer.num_sanity_val_steps", 0, *tasks, "--data.prompts_per_step", 32]
    if method == "offline":
        flags += ["--data.engine", "RolloutFiles", "--data.engine.paths", answers(folder)]
    _, config, *own = METHODS[method]
    call(folder / "done", "fit", "--config", f"exp/{config}", *flags, *own, costs=costs)


def answers(folder: Path) -> str:
    """Returns the file of a run's decodes, with an object of dLLM-RL's format in each line."""
    rows, lines = folder / "answers.json", folder / "answers.jsonl"
    cli.main(["traj", "export", str(folder / "traces"), "--out", str(rows)])
    each = (json.dumps(row) for row in json.loads(rows.read_text()))
    write_atomically(lines, "\n".join(each) + "\n")
    return json.dumps([str(lines)])


def evaluate(folder: Path, adapter: Path | None) -> None:
    """Decodes the held-out list; the untrained model does so at every threshold of its line."""
    decoders = {
        _name(level): {
            "policy": {"class_path": "ThresholdPolicy", "init_args": {"threshold": level}},
            "quota": "NoQuota",
            "settings": {"eos_rule": "fill"},
        }
        for level in (LINE if adapter is None else (THRESHOLD,))
    }
    call(
        folder / "evaluated",
        *("predict", "--config", "exp/benchmark_tiny", "--run_dir", folder),
        *("--model.init_args.sweep", "null", "--model.init_args.level", "tokens"),
        *("--model.init_args.decoders", json.dumps(decoders)),
        *([] if adapter is None else ["--model.backbone.init_args.adapter", adapter]),
        *("--data.tasks", problems("WordProblems", "test", 1000, seed=8)),
    )


def gathered(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the results of all arms: verdicts problem by problem, steps and processor time.

    ``line`` has the untrained model by threshold, ``methods`` a list over seeds by method.
    """

    def arms(folder: Path) -> dict[str, dict[str, Any]]:
        results = ResultFolder(folder / "results")
        found = {}
        for task, name in results.pairs():
            rows = sorted(results.rows(task, name), key=lambda row: row.uid)
            verdicts = "".join(str(int(row.correct)) for row in rows)
            found[name] = {"steps": statistics.mean(row.nfe for row in rows), "correct": verdicts}
        return found

    kept: dict[str, Any] = {"line": arms(options.out / "base"), "methods": {}}
    for method in METHODS:
        for seed in options.seeds:
            folder = options.out / f"{method}-{seed}"
            if (folder / "evaluated").exists():
                seconds = sum(map(float, (folder / "cpu_seconds").read_text().split()))
                arm = {"seed": seed, "cpu_minutes": round(seconds / 60, 2)}
                arm |= arms(folder)[_name(THRESHOLD)]
                kept["methods"].setdefault(method, []).append(arm)
    return kept


def _name(threshold: float) -> str:
    return f"threshold_{threshold}".replace(".", "")


def _verdicts(arms: Sequence[dict[str, Any]]) -> NDArray[Any]:
    return np.array([[float(digit) for digit in arm["correct"]] for arm in arms])


def markdown(kept: dict[str, Any]) -> str:
    """Returns the table of the page: differences in points, with errors over problems and seeds.

    ``over TraceRL`` compares a value model with TraceRL at the same learning rate. ``above the
    line`` compares with the untrained model at as many steps, interpolated between two thresholds.
    """
    line = sorted(kept["line"].values(), key=lambda arm: arm["steps"])
    shares = np.eye(len(line))
    before = kept["line"][_name(THRESHOLD)]
    lines = [
        ["", "right: mean, seeds", "rise", "over TraceRL", "steps", "above the line", "CPU minutes"]
    ]
    rate = _verdicts([before]).mean()
    lines.append(["before", f"{rate:.3f}", "", "", f"{before['steps']:.2f}", "", ""])
    for method, arms in kept["methods"].items():
        right = _verdicts(arms)
        other = method.replace("value", "tracerl") if method.startswith("value") else "tracerl"
        plain = {arm["seed"]: arm for arm in kept["methods"][other]}
        steps = [arm["steps"] for arm in arms]
        at_steps = [
            [np.interp(step, [one["steps"] for one in line], share) for share in shares]
            for step in steps
        ]
        lines.append(
            [
                METHODS[method][0],
                f"{right.mean():.3f}: {', '.join(f'{rate:.3f}' for rate in right.mean(1))}",
                points(right - _verdicts([before])),
                ""
                if method == other
                else points(right - _verdicts([plain[arm["seed"]] for arm in arms])),
                f"{statistics.mean(steps):.2f}",
                points(right - np.array(at_steps) @ _verdicts(line)),
                f"{statistics.mean(arm['cpu_minutes'] for arm in arms):.1f}",
            ]
        )
    return table(lines)


if __name__ == "__main__":
    main()
