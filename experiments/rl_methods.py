"""Policy losses of the literature against TraceRL on the embedded model, and preference pairs.

Every arm begins with the embedded model, decoded too fast for it (probability 0.6 at once), and
trains an adapter on the same prompts with the same learning rate, rewards and seeds: 12 RL steps of
``exp/*_tiny``, which have about as many training rows. ``dpo`` has pairs of right and wrong decodes
of the untrained model, as many responses as the others roll out, and about as many updates. All are
decoded greedily with that threshold on one held-out list that had no part in anything before.

Parts that are on disk are not made again, so a killed run goes on, and a call with
``--only-report`` reports what there is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chain import EXP, call, difference, points, problems, seed_flags, table

from lit_dlm.ops.files import write_atomically
from lit_dlm.reports.results import ResultFolder

METHODS = {"tracerl": "TraceRL", "espo": "ESPO", "spg": "SPG", "wd1": "wd1", "dpo": "VRPO (DPO)"}
"""Arms and their names in the table."""

THRESHOLD = 0.6
LINE = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75)
"""Of the decoder that is trained for, and of the untrained model's front."""


def main() -> None:
    """Runs what is missing, then reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/rl_methods"))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=12, help="RL steps")
    parser.add_argument("--prompts", type=int, default=32, help="of an RL step")
    parser.add_argument(
        "--updates", type=int, default=150, help="of dpo, about as many as of others"
    )
    parser.add_argument("--size", type=int, default=1000, help="problems of the held-out list")
    parser.add_argument("--list-seed", type=int, default=8, help="of the held-out list")
    parser.add_argument("--only-report", action="store_true", help="train nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.only_report:
        evaluate(options, options.out / "base", None)
        for seed, method in itertools.product(options.seeds, options.methods):
            train(options, method, seed)
            folder = options.out / f"{method}-{seed}"
            evaluate(options, folder, folder / "adapter")
    report = condense(options)
    write_atomically(options.out / "rl_methods.json", json.dumps(report, indent=1) + "\n")
    print(markdown(report))


def train(options: argparse.Namespace, method: str, seed: int) -> None:
    """Trains one arm; notes its processor time, since wall time depends on neighbours."""
    folder = options.out / f"{method}-{seed}"
    done = folder / "done"
    if done.exists():
        return
    tasks = ["--data.tasks", problems("WordProblems", "train", 400, seed=seed)]
    flags = [*seed_flags(seed), "--run_dir", folder, "--model.export_dir", folder / "adapter"]
    flags += ["--trainer.callbacks", "[]", "--trainer.enable_checkpointing", "false"]
    flags += ["--trainer.logger", "false"]
    began = time.process_time()
    if method == "dpo":
        call(
            folder / "decoded",
            *("predict", "--config", EXP / "distill_pairs_tiny.yaml", "--run_dir", folder),
            *("--seed_everything", seed, "--model.seed", seed, *tasks),
        )
        flags += ["--trainer.max_steps", options.updates]
    else:
        flags += ["--trainer.max_epochs", options.steps, "--trainer.limit_val_batches", 0]
        flags += ["--trainer.num_sanity_val_steps", 0, *tasks]
        flags += ["--data.prompts_per_step", options.prompts]
    call(done, "fit", "--config", EXP / f"{method}_tiny.yaml", *flags)
    write_atomically(folder / "cpu_seconds", str(time.process_time() - began))


def evaluate(options: argparse.Namespace, folder: Path, adapter: Path | None) -> None:
    """Decodes the held-out list, with the untrained model for every threshold of its line."""
    decoders = {
        f"threshold_{level}".replace(".", ""): {
            "policy": {"class_path": "ThresholdPolicy", "init_args": {"threshold": level}},
            "quota": "NoQuota",
            "settings": {"eos_rule": "fill"},
        }
        for level in (LINE if adapter is None else (THRESHOLD,))
    }
    call(
        folder / "evaluated",
        *("predict", "--config", EXP / "benchmark_tiny.yaml", "--run_dir", folder),
        *("--model.init_args.sweep", "null", "--model.init_args.level", "tokens"),
        *("--model.init_args.decoders", json.dumps(decoders)),
        *([] if adapter is None else ["--model.backbone.init_args.adapter", adapter]),
        "--data.tasks",
        problems("WordProblems", "test", options.size, seed=options.list_seed),
    )


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    """By method, the results by uid."""
    results = ResultFolder(folder / "results")
    return {
        method: {row.uid: row for row in results.rows(task, method)}
        for task, method in results.pairs()
    }


def condense(options: argparse.Namespace) -> dict[str, Any]:
    """Accuracy, rise, steps and what lies above the untrained line, of every arm with a result."""
    base = rows_of(options.out / "base")
    name = f"threshold_{THRESHOLD}".replace(".", "")
    line = sorted((_mean(rows, "nfe"), _mean(rows, "correct")) for rows in base.values())
    steps, rates = zip(*line, strict=True)
    correct = _verdicts(base[name])
    report: dict[str, Any] = {
        "problems": len(correct),
        "line": [list(point) for point in line],
        "before": {"accuracy": _mean(base[name], "correct"), "steps": _mean(base[name], "nfe")},
        "methods": {},
    }
    traced: list[dict[str, float]] = []
    for method in METHODS:
        folders = [options.out / f"{method}-{seed}" for seed in options.seeds]
        folders = [folder for folder in folders if (folder / "evaluated").exists()]
        if not folders:
            continue
        tables = [rows_of(folder)[name] for folder in folders]
        verdicts = [_verdicts(rows) for rows in tables]
        traced = traced or verdicts  # TraceRL is the first
        seconds = [f / "cpu_seconds" for f in folders if (f / "cpu_seconds").exists()]
        found = {
            "seeds": [_mean(rows, "correct") for rows in tables],
            "steps": [_mean(rows, "nfe") for rows in tables],
            "rise": difference(verdicts, [correct]),
            "cpu_minutes": statistics.mean(float(f.read_text()) for f in seconds) / 60,
        }
        if method != "tracerl" and len(verdicts) == len(traced):
            found["over_tracerl"] = difference(verdicts, traced)
        above = [
            rate - float(np.interp(step, steps, rates))
            for rate, step in zip(found["seeds"], found["steps"], strict=True)
        ]
        found["above_line"] = statistics.mean(above)
        report["methods"][method] = found
    return report


def _mean(rows: dict[str, Any], name: str) -> float:
    return statistics.mean(float(getattr(row, name)) for row in rows.values())


def _verdicts(rows: dict[str, Any]) -> dict[str, float]:
    return {uid: float(row.correct) for uid, row in rows.items()}


def markdown(report: dict[str, Any]) -> str:
    """The table of docs/tracerl.md."""
    head = ["method", "accuracy", "by seed", "rise, points", "over TraceRL", "steps"]
    lines = [[*head, "above the line", "CPU minutes"]]
    before = report["before"]
    lines.append(
        ["before", f"{before['accuracy']:.3f}", *[""] * 3, f"{before['steps']:.2f}", "", ""]
    )
    for method, found in report["methods"].items():
        lines.append(
            [
                METHODS[method],
                f"{statistics.mean(found['seeds']):.3f}",
                ", ".join(f"{value:.3f}" for value in found["seeds"]),
                points(found["rise"]),
                points(found["over_tracerl"]) if "over_tracerl" in found else "",
                f"{statistics.mean(found['steps']):.2f}",
                f"{100 * found['above_line']:+.1f}",
                f"{found['cpu_minutes']:.1f}",
            ]
        )
    return table(lines)


if __name__ == "__main__":
    main()
