"""What TABOM changes on the embedded model, against other fine-tuning on as many examples.

The whole experiment through the command line, in one process: distil once, then for every seed
train each method on equally many examples and optimiser steps, decode held-out problems in the
domain (word problems) and outside it (Python functions), and score held-out decodes. The shipped
weights are too good to improve, so start from a model that was trained for less time; page
``docs/tabom_results.md`` has the commands.

Parts that are on disk are not made again, so a stopped run goes on. Differences between methods are
paired: by problem, after averaging over seeds. Their standard error is the larger one of two, that
over problems and that over seeds.
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from chain import EXP, call, difference, gained, problems, table
from matplotlib.figure import Figure

from lit_dlm.ops.files import write_atomically
from lit_dlm.reports.plots import Theme, method_styles, save_themes, tidy_axes
from lit_dlm.reports.results import ResultFolder

METHODS = {
    "sft-gt": ("sft_gt_tiny.yaml",),
    "sft-sd": ("sft_sd_tiny.yaml",),
    "window-ce": ("tabom_tiny.yaml", "--model.rank_weight", "0"),
    "tabom": ("tabom_tiny.yaml",),
}
"""Configuration and flags of each method."""

Cell = tuple[str, str]
"""A task and a decoding method."""


@dataclass
class Scores:
    """What was measured of one method."""

    correct: dict[Cell, list[dict[str, bool]]] = field(default_factory=dict)
    """Verdicts by uid, one table for each seed."""
    values: dict[str, list[float]] = field(default_factory=dict)
    """Scores on held-out decodes, one value for each seed."""
    curves: list[list[float]] = field(default_factory=list)
    """Discrimination score of each step, one curve for each seed."""


def main() -> None:
    """Runs the experiment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder of the model to start from")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of training")
    parser.add_argument("--distil", type=int, default=4000, help="training problems to decode")
    parser.add_argument("--examples", type=int, default=1800, help="for every method, at most")
    parser.add_argument("--task-seed", type=int, default=0, help="of the held-out problems")
    parser.add_argument("--sizes", nargs=2, type=int, default=[1000, 500], help="in, out of domain")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="'NAME METHOD FLAGS'",
        help="one more method: another one with flags for `fit`; may be repeated",
    )
    parser.add_argument("--flags", default="", help="flags for every `fit`")
    parser.add_argument(
        "--decoders", nargs="+", default=["entropy", "entropy_2"], help="of evaluate_tabom_tiny"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    methods = {name: METHODS[name] for name in options.methods}
    for text in options.variant:
        name, base, *flags = shlex.split(text)
        if base not in METHODS:
            parser.error(f"--variant: expected one of {', '.join(METHODS)}, got {base!r}")
        methods[name] = (*METHODS[base], *flags)
    report = run(options, methods)
    write_atomically(options.out / "effect.json", json.dumps(report, indent=2) + "\n")
    write_atomically(options.out / "effect.md", markdown(report))
    print(json.dumps(report) if options.json else markdown(report))


def run(options: argparse.Namespace, methods: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """Makes what is not on disk yet, and condenses all of it."""
    base = ["--model.backbone.init_args.path", options.model]
    call(
        options.out / "distilled",
        *("predict", "--config", EXP / "distill_tiny.yaml", "--run_dir", options.out, *base),
        *("--data.tasks", problems("WordProblems", "train", options.distil)),
    )
    scores = {"base": Scores()}
    measure(options, base, "base", scores["base"])
    for seed in options.seeds:
        for name, (config, *flags) in methods.items():
            label = f"{name}-s{seed}"
            folder = options.out / "fit" / label
            call(
                folder / "done",
                *("fit", "--config", EXP / config, "--run_dir", options.out, *base),
                *("--trainer.default_root_dir", folder, "--trainer.logger", "false"),
                *("--trainer.enable_checkpointing", "false", "--trainer.callbacks", "[]"),
                *("--model.export_dir", folder / "adapter"),
                *("--model.seed", seed, "--seed_everything", seed),
                *("--data.limit", options.examples, "--data.val_fraction", "0.1"),
                *(*shlex.split(options.flags), *flags),
            )
            adapter = ["--model.backbone.init_args.adapter", str(folder / "adapter")]
            measure(options, [*base, *adapter], label, scores.setdefault(name, Scores()))
    draw(scores, options.out / "effect.png")
    return condense(scores, options)


def measure(options: argparse.Namespace, model: Sequence[str], label: str, scores: Scores) -> None:
    """Decodes held-out problems and scores held-out decodes with one model.

    Args:
        options: of the command line.
        model: flags that name it.
        label: folder of its results.
        scores: receives them.
    """
    inside, outside = options.sizes
    folder = options.out / f"eval-{options.task_seed}" / label
    tasks = [
        problems("WordProblems", "test", inside, seed=options.task_seed),
        problems(
            "PythonFunctions", "test", outside, seed=options.task_seed, allow_code_execution=True
        ),
    ]
    call(
        folder / f"done-{'-'.join(options.decoders)}",
        *("predict", "--config", EXP / "evaluate_tabom_tiny.yaml", "--run_dir", folder, *model),
        *("--data.tasks", f"[{', '.join(task[1:-1] for task in tasks)}]"),
        *("--data.methods", f"[{', '.join(options.decoders)}]"),
    )
    results = ResultFolder(folder / "results")
    for cell in results.pairs():
        if cell[1] not in options.decoders:
            continue
        verdicts = {row.uid: row.correct for row in results.rows(*cell)}
        scores.correct.setdefault(cell, []).append(verdicts)
    folder = options.out / "scores" / label
    call(
        folder / "done",
        *("validate", "--config", EXP / "tabom_scores_tiny.yaml", "--run_dir", options.out, *model),
        *("--trainer.default_root_dir", folder, "--trainer.logger.init_args.save_dir", folder),
        *("--trainer.callbacks.init_args.folder", folder),
        *("--data.limit", options.examples),
    )
    (table,) = folder.glob("logs/version_0/metrics.csv")
    *_, row = csv.DictReader(table.read_text().splitlines())
    discrimination = json.loads((folder / "discrimination.json").read_text())
    found = {
        "violated pairs": 1.0 - float(row["val/pair_accuracy"]),
        "ranking loss": float(row["val/loss_rank"]),
        "cross-entropy": float(row["val/loss_ce"]),
        "TDS": discrimination["scores"]["validate"],
    }
    for name, value in found.items():
        scores.values.setdefault(name, []).append(value)
    scores.curves.append(discrimination["curves"]["validate"])


def draw(scores: dict[str, Scores], path: Path) -> None:
    """Two panels: the discrimination score of each step, and the pairs out of order.

    Args:
        scores: of all methods; curves are means over seeds, every seed has its own point.
        path: file to write.
    """

    def figure(theme: Theme) -> Figure:
        drawn = Figure(figsize=(9.6, 3.6), layout="constrained")
        left, right = drawn.subplots(1, 2)
        styles = method_styles(list(scores), theme)
        for number, (name, found) in enumerate(scores.items()):
            look = {key: styles[number][key] for key in ("color", "linestyle")}
            curve = [statistics.mean(step) for step in zip(*found.curves, strict=False)]
            left.plot(curve, label=name, linewidth=1.3, **look)
            shares = [100 * share for share in found.values["violated pairs"]]
            right.bar(number, statistics.mean(shares), color=look["color"], alpha=0.6)
            right.plot([number] * len(shares), shares, ".", color=theme.text, markersize=4)
        left.set(xlabel="decode step", ylabel="variance of open entropies, nats²", ylim=(0, None))
        left.legend(fontsize="small")
        right.set(ylabel="pairs out of order, %", ylim=(0, None))
        right.set_xticks(range(len(scores)), list(scores), rotation=20)
        tidy_axes(left, right)
        return drawn

    save_themes(path, figure)


def condense(scores: dict[str, Scores], options: argparse.Namespace) -> dict[str, Any]:
    """Means, and paired differences of every method to every other: what ``effect.json`` holds."""
    cells = list(scores["base"].correct)
    report: dict[str, Any] = {
        "settings": {name: str(value) for name, value in vars(options).items() if name != "json"},
        "methods": {},
        "differences": {},
    }
    for name, found in scores.items():
        report["methods"][name] = {
            "accuracy": {
                "/".join(cell): [statistics.mean(seed.values()) for seed in found.correct[cell]]
                for cell in cells
            },
            **found.values,
        }
    for one, first in scores.items():
        for two, second in scores.items():
            if one != two:
                report["differences"][f"{one} - {two}"] = {
                    "/".join(cell): difference(first.correct[cell], second.correct[cell])
                    for cell in cells
                }
    return report


def markdown(report: dict[str, Any]) -> str:
    """The report as two tables."""
    methods = report["methods"]
    cells = list(methods["base"]["accuracy"])
    values = [name for name in methods["base"] if name != "accuracy"]
    lines = [["method", *cells, *values]]
    for name, found in methods.items():
        rates = [f"{100 * statistics.mean(found['accuracy'][cell]):.1f} %" for cell in cells]
        lines.append([name, *rates, *(f"{statistics.mean(found[value]):.4f}" for value in values)])
    more = [["difference, points", *cells]]
    for name, found in report["differences"].items():
        if name.endswith(" - base") or name.startswith("tabom"):
            more.append([name, *(gained(found[cell]) for cell in cells)])
    return f"{table(lines)}\n{table(more)}"


if __name__ == "__main__":
    main()
