"""Certain of many cells at once: dParallel beside TABOM, and what either costs elsewhere.

For every seed each method trains one adapter of the embedded model on its own right answers to word
problems, the same examples and as many steps. Then all decode fresh problems at several thresholds,
Python functions, which none trains on, and many samples of each of some problems at a temperature.
``docs/few_steps.md`` has commands and results. All of it runs through the command line; parts that
are on disk are not made again.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from chain import EXP, call, difference, gained, problems, table

from lit_dlm.ops.files import write_atomically
from lit_dlm.reports.results import ResultFolder, ResultRow
from lit_dlm.reports.summary import pass_at_k

METHODS = {
    "sft": "sft_sd_tiny.yaml",
    "tabom": "tabom_tiny.yaml",
    "dparallel": "dparallel_tiny.yaml",
}
FRONTS = ("base", "tabom", "dparallel")
"""Whose accuracy against forwards is measured."""
SAMPLED = ("base", "sft", "tabom")
"""Whose pass@k is measured."""
THRESHOLDS = (0.5, 0.7, 0.8, 0.9, 0.98)
BLOCKS = {"window": {"class_path": "BlockWindow", "init_args": {"block_length": 8}}}
WORDS, FUNCTIONS = "word_problems", "python_functions"
KS = (1, 2, 4, 8, 16, 32, 64)

Rows = dict[str, ResultRow]


def decoder(threshold: float, **plugs: Any) -> dict[str, Any]:
    """A decoder that commits at a threshold."""
    policy = {"class_path": "ThresholdPolicy", "init_args": {"threshold": threshold}}
    return {"policy": policy, "quota": "NoQuota", **plugs}


DECODERS = {
    f"{name}_{threshold}": decoder(threshold, **plugs)
    for name, plugs in (("whole", {}), ("blocks", BLOCKS))
    for threshold in THRESHOLDS
}
SAMPLER = decoder(0.9, **BLOCKS, cache={"class_path": "DualCache"}, sampler={"temperature": 1.0})


def main() -> None:
    """Makes what is missing, then reports on what is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of training")
    parser.add_argument("--only-report", action="store_true", help="run nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.only_report:
        task = problems("WordProblems", "train", 4000)
        call(
            options.out / "distilled",
            *("predict", "--config", EXP / "distill_tiny.yaml", "--run_dir", options.out),
            *("--data.tasks", task),
        )
        for seed in options.seeds:
            for method in METHODS:
                train(options.out, method, seed)
        for part in (fronts, functions, samples):
            for seed in options.seeds:
                for method in ("base", *METHODS):
                    part(options.out, method, seed)
    report = condense(options.out, options.seeds)
    write_atomically(options.out / "few_steps.json", json.dumps(report, indent=1) + "\n")
    write_atomically(options.out / "few_steps.tables.md", markdown(report))
    print(markdown(report))


def train(out: Path, method: str, seed: int) -> None:
    """Trains one adapter; a tenth of the prompts is left out."""
    folder = out / "fit" / f"{method}-s{seed}"
    call(
        folder / "done",
        *("fit", "--config", EXP / METHODS[method], "--run_dir", out),
        *("--trainer.default_root_dir", folder, "--trainer.logger", "false"),
        *("--trainer.enable_checkpointing", "false", "--trainer.callbacks", "[]"),
        *("--model.export_dir", folder / "adapter", "--data.limit", 1800),
        *("--model.seed", seed, "--seed_everything", seed),
    )


def measure(out: Path, method: str, seed: int, part: str, *flags: object) -> None:
    """Decodes with one model; the base has one seed."""
    folder = out / part / f"{method}-s{seed}"
    adapter = out / "fit" / f"{method}-s{seed}" / "adapter"
    model = () if method == "base" else ("--model.backbone.init_args.adapter", adapter)
    if method != "base" or seed == 0:
        config = EXP / "evaluate_tiny.yaml"
        call(folder / "done", "predict", "--config", config, "--run_dir", folder, *model, *flags)


def fronts(out: Path, method: str, seed: int) -> None:
    """1,000 fresh word problems at all thresholds."""
    if method in FRONTS:
        task = problems("WordProblems", "test", 1000, seed=21)
        decoders = ("--model.decoders", json.dumps(DECODERS))
        measure(
            *(out, method, seed, "fronts", "--data.tasks", task, *decoders),
            *("--data.methods", f"[{', '.join(DECODERS)}]"),
        )


def functions(out: Path, method: str, seed: int) -> None:
    """300 functions, one token a step in entropy order and at all thresholds."""
    task = problems("PythonFunctions", "test", 300, seed=21, allow_code_execution=True)
    names = ["entropy", *(DECODERS if method in FRONTS else ())]
    measure(
        *(out, method, seed, "functions", "--data.tasks", task),
        *("--model.decoders", json.dumps({"entropy": {"policy": "EntropyPolicy"}, **DECODERS})),
        *("--data.methods", f"[{', '.join(names)}]"),
    )


def samples(out: Path, method: str, seed: int) -> None:
    """64 samples of each of 200 word problems at temperature 1."""
    if method in SAMPLED:
        measure(
            *(out, method, seed, "samples"),
            *("--data.tasks", problems("WordProblems", "test", 200, seed=22)),
            *("--model.decoders", json.dumps({"sampled": SAMPLER})),
            *("--data.methods", "[sampled]", "--data.responses_per_prompt", max(KS)),
        )


def ended(out: Path, part: str, methods: Sequence[str], seeds: Sequence[int]) -> list[int]:
    """The seeds in which a part has ended for every method."""
    tuned = [method for method in methods if method != "base"]
    return [
        seed
        for seed in seeds
        if all((out / part / f"{method}-s{seed}" / "done").exists() for method in tuned)
    ]


def read(out: Path, part: str, method: str, seeds: Sequence[int]) -> dict[str, list[Rows]]:
    """Rows by uid of every decoder, one table for each seed."""
    found: dict[str, list[Rows]] = {}
    for seed in seeds if method != "base" else [0]:
        results = ResultFolder(out / part / f"{method}-s{seed}" / "results")
        for task, name in results.pairs():
            found.setdefault(name, []).append({row.uid: row for row in results.rows(task, name)})
    return found


def verdicts(tables: Sequence[Rows]) -> list[dict[str, float]]:
    """What is right, one table for each seed."""
    return [{uid: float(row.correct) for uid, row in rows.items()} for rows in tables]


def forwards(rows: Rows) -> float:
    """Mean forwards of a decode."""
    return statistics.mean(row.nfe for row in rows.values())


def line(
    fronts: dict[str, list[Rows]], prefix: str, seed: int, at: float
) -> dict[str, float] | None:
    """Verdicts between the two thresholds whose forwards enclose a number, mixed; else ``None``."""
    tables = [found[seed] for name, found in fronts.items() if name.startswith(prefix)]
    tables.sort(key=forwards)
    for fast, slow in pairwise(tables):
        if forwards(fast) <= at <= forwards(slow):
            share = (at - forwards(fast)) / (forwards(slow) - forwards(fast))
            return {
                uid: (1 - share) * row.correct + share * slow[uid].correct
                for uid, row in fast.items()
            }
    return None


def pass_rates(rows: Rows) -> dict[int, dict[str, float]]:
    """By ``k``: pass@k of each problem."""
    grades: dict[str, list[bool]] = {}
    for row in rows.values():
        grades.setdefault(row.prompt_uid, []).append(row.correct)
    return {
        k: {uid: pass_at_k(len(found), sum(found), k) for uid, found in grades.items()} for k in KS
    }


def spread(tables: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Means of the seeds, and the larger standard error, over problems or over seeds."""
    whole = difference(tables, [dict.fromkeys(tables[0], 0.0)])
    seeds = [statistics.mean(table.values()) for table in tables]
    return {"seeds": seeds, "error": max(whole["stderr_problems"], whole["stderr_seeds"])}


def condense(out: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """Everything that the tables show: what ``few_steps.json`` holds."""
    report: dict[str, Any] = {"fronts": {}, "functions": {}, "pass": {}, "changes": {}}
    by_task = {
        part: {
            method: read(out, part, method, ended(out, part, FRONTS, seeds)) for method in FRONTS
        }
        for part in ("fronts", "functions")
    }
    for part, methods in by_task.items():
        task = WORDS if part == "fronts" else FUNCTIONS
        for name in DECODERS:
            cell = report["fronts"][f"{task}/{name}"] = {}
            for method, found in methods.items():
                cell[method] = {
                    **spread(verdicts(found[name])),
                    "forwards": statistics.mean(map(forwards, found[name])),
                }
    for name in DECODERS:
        rows = by_task["fronts"]["dparallel"][name]
        mixed = [
            line(by_task["fronts"]["tabom"], name.split("_")[0], number, forwards(table))
            for number, table in enumerate(rows)
        ]
        pairs = [(one, two) for one, two in zip(verdicts(rows), mixed, strict=True) if two]
        if pairs:
            ours, theirs = zip(*pairs, strict=True)
            report["changes"][f"dparallel - tabom/{name}"] = difference(ours, theirs)
            report["fronts"][f"{WORDS}/{name}"]["seeds at equal forwards"] = len(pairs)
    done = ended(out, "functions", list(METHODS), seeds)
    plain = {m: verdicts(read(out, "functions", m, done)["entropy"]) for m in ("base", *METHODS)}
    for method, right in plain.items():
        report["functions"][method] = spread(right)
        for other in ("base", "sft"):
            if method not in ("base", other):
                report["changes"][f"{method} - {other}/functions"] = difference(right, plain[other])
    done = ended(out, "samples", SAMPLED, seeds)
    rates = {
        method: [pass_rates(rows) for rows in read(out, "samples", method, done)["sampled"]]
        for method in SAMPLED
    }
    for method, by_seed in rates.items():
        report["pass"][method] = {str(k): spread([seed[k] for seed in by_seed]) for k in KS}
    for one, two in (("sft", "base"), ("tabom", "base"), ("tabom", "sft")):
        for k in KS:
            report["changes"][f"{one} - {two}/pass@{k}"] = difference(
                [seed[k] for seed in rates[one]], [seed[k] for seed in rates[two]]
            )
    return report


def rate(found: dict[str, Any]) -> str:
    """A mean over seeds with its error, in percent."""
    return f"{100 * statistics.mean(found['seeds']):.1f} ± {100 * found['error']:.1f}"


def markdown(report: dict[str, Any]) -> str:
    """Three tables: fronts, functions at one token a step, pass@k."""
    lines = [["task, decoder, threshold", *FRONTS, "dparallel less tabom at equal forwards"]]
    for name, cell in report["fronts"].items():
        task, _, decoding = name.partition("/")
        shown = [f"{rate(cell[one])} / {cell[one]['forwards']:.1f}" for one in FRONTS]
        count = cell.get("seeds at equal forwards")
        equal = report["changes"].get(f"dparallel - tabom/{decoding}")
        gain = f"{gained(equal)} ({count} seeds)" if count else ""
        lines.append([f"{task} {decoding.replace('_', ' ')}", *shown, gain])
    methods = [["method", "Python functions", "less base", "less sft"]]
    for method, found in report["functions"].items():
        keys = [f"{method} - {other}/functions" for other in ("base", "sft")]
        gains = [gained(report["changes"][key]) if key in report["changes"] else "" for key in keys]
        methods.append([method, rate(found), *gains])
    passes = [["k", *SAMPLED, "tabom less base", "tabom less sft"]]
    for k in KS:
        gains = [
            gained(report["changes"][f"tabom - {other}/pass@{k}"]) for other in ("base", "sft")
        ]
        passes.append([str(k), *(rate(report["pass"][m][str(k)]) for m in SAMPLED), *gains])
    return "\n".join(map(table, (lines, methods, passes)))


if __name__ == "__main__":
    main()
