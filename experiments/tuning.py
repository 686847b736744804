"""What fine-tuning on a model's own decodes gives, and what it costs elsewhere.

Five methods tune an adapter of the embedded model, as it ships (``full``) and stopped early
(``weak``), on as many examples of word problems for as many steps: reference answers (``sft-gt``),
own right answers (``sft-sd``), the same cut at a step of their decode (``window``), with the order
of that decode as well (TABOM, arXiv 2605.11854), and dParallel (2509.26488). All then decode fresh
word problems one and two tokens a step and at thresholds, and Python functions, which none trains
on; some draw many samples of each problem.

    lit-dlm fit --config exp/pretrain_tiny --run_dir runs/weak --trainer.max_steps 1400
    python experiments/tuning.py --weak runs/weak/model --out runs/tuning  # makes what is missing
    python experiments/tuning.py  # tables and picture of the published results

Parts that exist are not made again. Several processes may make different ``--models`` and
``--train_seeds`` of one folder; a last run without these options collects all.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
from chain import (
    BARE,
    Decodes,
    between,
    call,
    keep_decodes,
    parser,
    points,
    problems,
    read_decodes,
    seed_flags,
    standard_error,
    table,
)
from matplotlib.figure import Figure
from numpy.typing import NDArray
from policy_bench import block, cells, swept, top

from lit_dlm.reports.plots import Theme, common_legend, method_styles, save_themes, tidy_axes
from lit_dlm.reports.summary import pass_at_k
from lit_dlm.system.files import write_atomically

MODELS = ("weak", "full")
METHODS: dict[str, tuple[str, ...]] = {
    "base": (),
    "sft-gt": ("sft_gt_tiny",),
    "sft-sd": ("sft_gt_tiny", "--config", "data/own_answers_tiny"),
    "window": ("tabom_tiny", "--model.rank_weight", "0"),
    "tabom": ("tabom_tiny",),
    "dparallel": ("dparallel_tiny",),
}
"""Configuration and flags of each method."""
SAMPLED = ("base", "sft-sd", "tabom")
"""Whose pass@k is measured."""
KS = (1, 4, 16, 64)
WORDS, FUNCTIONS = "word_problems", "python_functions"
LEVELS = (0.5, 0.7, 0.9, 0.98)

ORDERED = cells({"entropy": top("EntropyPolicy", 1, 2)}, ["whole"])
SWEPT = cells({"threshold": swept("ThresholdPolicy", "threshold", *LEVELS)}, ["whole", "blocks-8"])
SAMPLER = {
    **swept("ThresholdPolicy", "threshold", 0.9)["0.9"],
    **block(8, cache={"class_path": "DualCache"}),
    "sampler": {"temperature": 1.0},
}
SCORES = {"out of order": "val/pair_accuracy", "ranking loss": "val/loss_rank"}


def main() -> None:
    """Makes what is missing, then tables and picture."""
    words = parser(__doc__, 0, 1, 2)
    words.add_argument("--weak", help="folder of the model that was stopped early")
    words.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = words.parse_args()
    kept = (options.out or Path("docs/results/tuning")) / "tuning.parquet"
    if options.out:
        if not options.weak and "weak" in options.models:
            words.error("--weak: needed for runs")
        runs = []
        scores: dict[str, list[dict[str, float]]] = {}
        for name, seed in itertools.product(options.models, options.train_seeds):
            for method in METHODS if seed == options.train_seeds[0] else list(METHODS)[1:]:
                part = method if method == "base" else f"{method}-s{seed}"
                arm, folder = f"{name}, {method}", options.out / name / part
                model = tuned(options, name, method, seed, folder)
                runs += [(arm, seed, place) for place in decoded(name, method, folder, model)]
                scores.setdefault(arm, []).append(scored(options, name, folder, model))
        keep_decodes(kept, runs)
        write_atomically(kept.with_suffix(".json"), json.dumps(scores, indent=1) + "\n")
    decodes = read_decodes(kept)
    draw(decodes, kept.with_suffix(".png"))
    print(markdown(decodes, json.loads(kept.with_suffix(".json").read_text())))


def tuned(
    options: argparse.Namespace, name: str, method: str, seed: int, folder: Path
) -> list[Any]:
    """Trains the adapter of a method unless it exists; returns the flags of the model with it."""
    start = options.weak if name == "weak" else "tiny"
    model, own = ["--model.backbone.init_args.path", start], options.out / name
    call(
        own / "distilled",
        *("predict", "--config", "exp/distill_tiny", *model, "--run_dir", own),
        *("--data.tasks", problems("WordProblems", "train", 4000)),
    )
    if method == "base":
        return model
    config, *flags = METHODS[method]
    call(
        folder / "done",
        *("fit", "--config", f"exp/{config}", *model, *seed_flags(seed), "--run_dir", own),
        *("--trainer.default_root_dir", folder, *BARE, "--model.export_dir", folder / "adapter"),
        *("--data.limit", 1800, "--data.val_fraction", "0.1", *flags),
    )
    return [*model, "--model.backbone.init_args.adapter", folder / "adapter"]


def decoded(name: str, method: str, folder: Path, model: list[Any]) -> list[Path]:
    """Decodes the test lists; returns the folders of results."""
    lists = {
        "words": (problems("WordProblems", "test", 1000, seed=41), {**ORDERED, **SWEPT}),
        "functions": (
            problems("PythonFunctions", "test", 500, seed=41, allow_code_execution=True),
            ORDERED,
        ),
        "samples": (problems("WordProblems", "test", 200, seed=42), {"sampled": SAMPLER}),
    }
    if method not in SAMPLED:
        del lists["samples"]
    for part, (tasks, decoders) in lists.items():
        more = ["--data.responses_per_prompt", max(KS)] if part == "samples" else []
        call(
            folder / part / "done",
            *("predict", "--config", "exp/evaluate_tiny", *model, *more),
            *("--run_dir", folder / part, "--data.tasks", tasks),
            *("--model.decoders", json.dumps(decoders)),
            *("--data.methods", json.dumps(list(decoders))),
        )
    return [folder / part / "results" for part in lists]


def scored(
    options: argparse.Namespace, name: str, folder: Path, model: list[Any]
) -> dict[str, float]:
    """Scores order and certainty on decodes of the untuned model that training left out."""
    place = folder / "scores"
    call(
        place / "done",
        *("validate", "--config", "exp/tabom_scores_tiny", *model),
        *("--run_dir", options.out / name, "--trainer.default_root_dir", place),
        *("--trainer.logger.init_args.save_dir", place, "--data.limit", 1800),
        *("--trainer.callbacks.init_args.folder", place),
    )
    *_, found = sorted(place.glob("logs/version_*/metrics.csv"))
    *_, row = csv.DictReader(found.read_text().splitlines())
    values = {score: float(row[column]) for score, column in SCORES.items()}
    values["out of order"] = 1.0 - values["out of order"]
    kept = json.loads((place / "discrimination.json").read_text())
    return values | {"TDS": kept["scores"]["validate"]}


def models(decodes: Decodes) -> list[str]:
    """Returns those of :data:`MODELS` that were decoded."""
    return [name for name in MODELS if any(arm.startswith(name) for arm, *_ in decodes)]


def rates(right: NDArray[Any], k: int) -> NDArray[Any]:
    """Returns pass@k of each problem from ``(seeds, problems * samples)`` verdicts in order."""
    counts = right.reshape(len(right), -1, max(KS)).sum(2)
    return np.vectorize(lambda won: pass_at_k(max(KS), int(won), k))(counts)


def markdown(decodes: Decodes, scores: dict[str, Any]) -> str:
    """Returns four tables: all methods, gains of TABOM and the window, thresholds, pass@k."""
    columns = {
        "words, 1 a step": (WORDS, "entropy_1_whole"),
        "2 a step": (WORDS, "entropy_2_whole"),
        "functions, 1 a step": (FUNCTIONS, "entropy_1_whole"),
        "functions, 2": (FUNCTIONS, "entropy_2_whole"),
    }
    found: dict[str, list[list[str]]] = {
        "all": [["model", "method", *columns, *next(iter(scores.values()))[0]]],
        "gains": [["model", "difference", *columns]],
        "thresholds": [["model", "decoder", "base", "tabom", "dparallel", "dparallel less tabom"]],
        "samples": [["model", "k", *SAMPLED, "tabom less base", "tabom less sft-sd"]],
    }
    for model in models(decodes):
        for method in METHODS:
            means = [np.mean(list(values)) for values in transposed(scores[f"{model}, {method}"])]
            shown = [points(decodes[f"{model}, {method}", *c][1], "") for c in columns.values()]
            found["all"].append([model, method, *shown, *(f"{mean:.3f}" for mean in means)])
        for one, two in [
            *itertools.product(("tabom",), list(METHODS)[:4]),
            *itertools.product(("window", "sft-sd"), ["base"]),
        ]:
            gains = [
                points(decodes[f"{model}, {one}", *c][1] - decodes[f"{model}, {two}", *c][1])
                for c in columns.values()
            ]
            found["gains"].append([model, f"{one} less {two}", *gains])
        for window, level in itertools.product(("whole", "blocks-8"), LEVELS):
            cell = (WORDS, f"threshold_{level:g}_{window}")
            line = [model, f"{window} {level:g}"]
            for method in ("base", "tabom", "dparallel"):
                forwards, right = decodes[f"{model}, {method}", *cell]
                line.append(f"{points(right, '')} @ {forwards.mean():.1f}")
            fronts = [
                value
                for (arm, _, name), value in decodes.items()
                if arm == f"{model}, tabom" and name in SWEPT and name.endswith(window)
            ]
            same = between(fronts, float(forwards.mean()))
            found["thresholds"].append([*line, "" if same is None else points(right - same)])
        for k in KS:
            base, sft, tabom = (
                rates(decodes[f"{model}, {method}", WORDS, "sampled"][1], k) for method in SAMPLED
            )
            shown = [points(value, "") for value in (base, sft, tabom)]
            found["samples"].append(
                [model, str(k), *shown, points(tabom - base), points(tabom - sft)]
            )
    return "\n".join(map(table, found.values()))


def draw(decodes: Decodes, path: Path) -> None:
    """Draws word problems at thresholds in blocks: a panel per model, two standard errors."""

    def figure(theme: Theme) -> Figure:
        drawn = Figure(figsize=(9.2, 3.6), layout="constrained")
        panels = drawn.subplots(1, len(models(decodes)), squeeze=False)[0]
        for axis, model in zip(panels, models(decodes), strict=True):
            for method, style in zip(METHODS, method_styles(list(METHODS), theme), strict=True):
                front = [
                    decodes[f"{model}, {method}", WORDS, cell]
                    for cell in SWEPT
                    if cell.endswith("blocks-8")
                ]
                axis.errorbar(
                    [forwards.mean() for forwards, _ in front],
                    [100 * right.mean() for _, right in front],
                    yerr=[200 * standard_error(right) for _, right in front],
                    label=method,
                    capsize=2,
                    markersize=4,
                    **style,
                )
            axis.set(title=model, xlabel="forwards", ylabel="right answers, %")
            tidy_axes(axis)
        common_legend(drawn, len(METHODS))
        return drawn

    save_themes(path, figure)


def transposed(seeds: list[dict[str, float]]) -> list[list[float]]:
    """Returns values by score, one for each seed."""
    return [[seed[name] for seed in seeds] for name in seeds[0]]


if __name__ == "__main__":
    main()
