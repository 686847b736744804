"""What fine-tuning, reinforcement learning, a learned policy and a cache add to each other.

Models are chains of stages, each trained on what the model before it decoded: ``sft`` (on its own
right answers), ``tabom`` (the same answers with their order) and ``rl`` (TraceRL). Every model gets
a TraceLock policy that is trained on its own traces, and decodes one fresh list of problems with
thresholds, entropy order and TraceLock, with and without a cache. All of it runs through the
command line. Parts that are on disk are not made again, so a stopped run goes on, and several
processes may make different ``--seeds`` of one folder.

Methods are compared at the same numbers of forwards, on the straight line between the two
neighbouring points of their front. Standard errors are over 1,000 resamples of problems and of
training seeds, the same ones for all, so that differences are paired.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chain import EXP, call, problems, seed_flags, table
from decode_states import task_options, tokenizer_of
from matplotlib.figure import Figure
from numpy.typing import NDArray
from probes import Probe

import lit_dlm.toy
from lit_dlm import cli
from lit_dlm.backbones import load_backbone, load_tokenizer
from lit_dlm.ops.files import write_atomically
from lit_dlm.reports.plots import (
    Theme,
    common_legend,
    family,
    method_styles,
    save_themes,
    tidy_axes,
)
from lit_dlm.reports.results import ResultFolder

CHAINS = ("base", "sft", "tabom", "rl", "sft-tabom", "sft-rl", "tabom-rl", "sft-tabom-rl")
"""Models: their stages in order, ``base`` without any."""

FAMILIES = {"threshold": 8.0, "tracelock": 8.0, "threshold_dual": 12.0, "tracelock_dual": 12.0}
"""Fronts that are compared, and at how many forwards: families of the methods of
``stack_tiny.yaml``. In blocks, which a cache needs, there are more of them."""

TIMED = ("base", "sft-tabom-rl")
"""Chains whose CPU time is measured, with the first seed."""

LENGTHS = {"WordProblems": 32, "Countdown": 56}
"""Response cells of each task."""

Front = Callable[[NDArray[Any], NDArray[Any]], float]
"""Accuracy for resampled seeds and problems."""


@dataclass(frozen=True)
class Model:
    """Results of one chain: arrays of shape (seeds, problems) by method."""

    correct: dict[str, NDArray[Any]]
    forwards: dict[str, NDArray[Any]]
    times: dict[str, float]
    """CPU milliseconds a problem by method, of the first seed; empty if they are not measured."""
    order: list[dict[str, float]]
    """Of each seed, from :meth:`~probes.Probe.order` and ``left_to_right``."""
    digests: list[dict[str, str]]
    """SHA-256, shortened, of each seed's weights, policy and records."""

    def at(self, name: str, forwards: float) -> Front:
        """Accuracy of a family at an average number of forwards.

        Returns:
            Of resampled seeds and problems (indices); not a number where the front does not reach.
        """
        methods = [method for method in self.correct if family(method) == name]

        def front(seeds: NDArray[Any], rows: NDArray[Any]) -> float:
            cells = np.ix_(seeds, rows)
            points = sorted(
                (self.forwards[method][cells].mean(), self.correct[method][cells].mean())
                for method in methods
            )
            steps, rates = zip(*points, strict=True)
            return float(np.interp(forwards, steps, rates, left=np.nan, right=np.nan))

        return front


def main() -> None:
    """Makes what is missing, then reports on what is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", type=Path, help="a kept stack.json: draws it, and runs nothing")
    parser.add_argument("--model", type=Path, help="folder of the model to start from")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--task", choices=LENGTHS, default="WordProblems")
    parser.add_argument("--chains", nargs="+", choices=CHAINS, default=list(CHAINS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of training")
    parser.add_argument("--distil", type=int, default=4000, help="problems to decode for a stage")
    parser.add_argument(
        "--examples", type=int, default=1800, help="that a stage trains on, at most"
    )
    parser.add_argument("--rl-steps", type=int, default=12)
    parser.add_argument("--traces", type=int, default=1600, help="problems to trace for TraceLock")
    parser.add_argument("--size", type=int, default=1000, help="problems of the test list")
    parser.add_argument("--list-seed", type=int, default=7, help="of the test list")
    parser.add_argument("--verify", type=int, default=200, help="records of a model decided again")
    parser.add_argument("--only-report", action="store_true", help="run nothing")
    options = parser.parse_args()
    if options.draw:
        draw(json.loads(options.draw.read_text()), options.draw.with_suffix(".png"))
        return
    if not (options.model and options.out):
        parser.error("expected --model and --out, or --draw")
    torch.set_num_threads(1)
    if not options.only_report:
        for seed, chain in itertools.product(options.seeds, options.chains):
            measure(options, chain, seed)
    models = read(options)
    if "base" not in models:
        parser.error(f"--chains: {options.out} has no results of base to compare with")
    report = condense(models)
    write_atomically(options.out / "stack.json", json.dumps(report, indent=2) + "\n")
    write_atomically(options.out / "stack.md", markdown(report))
    draw(report, options.out / "stack.png")
    print(markdown(report))


def measure(options: argparse.Namespace, chain: str, seed: int) -> None:
    """Trains a model of :data:`CHAINS` and its policy, decodes the test list, verifies records."""
    folder = options.out / f"{chain}-s{seed}"
    path = model_flags(options, trained(options, chain, seed))
    length = ["--data.response_length", LENGTHS[options.task]]
    seeds = ["--seed_everything", seed, "--model.seed", seed, "--run_dir", folder]
    call(
        folder / "traced",
        *("predict", "--config", EXP / "generate_tiny.yaml", *path, *seeds, *length),
        *("--data.tasks", problem_list(options, "train", options.traces, seed)),
    )
    call(
        folder / "policy" / "done",
        *("fit", "--config", EXP / "tracelock_tiny.yaml", *path, *seeds, "--data.seed", seed),
    )
    call(
        folder / "decoded",
        *("predict", "--config", EXP / "stack_tiny.yaml", *path, "--run_dir", folder),
        *("--data.tasks", problem_list(options, "test", options.size, options.list_seed), *length),
    )
    if options.verify and not (folder / "verified").exists():
        verify = ["traj", "verify", str(folder / "stack" / "trajectories"), "--level", "3"]
        verify += ["--backbone", str(path[1]), "--policy", str(folder / "policy")]
        verify += ["--sample", str(options.verify)]
        cli.main(verify)
        write_atomically(folder / "verified", " ".join(verify) + "\n")
    probe(
        options,
        folder,
        str(path[1]),
        is_timed=chain in TIMED and seed == options.seeds[0],
    )


def probe(options: argparse.Namespace, folder: Path, model: str, *, is_timed: bool) -> None:
    """Measures what results do not hold.

    Args:
        options: of the command line.
        folder: of the chain, with results and policy.
        model: folder of the weights.
        is_timed: whether CPU time is wanted, too.
    """
    task = getattr(lit_dlm.toy, options.task)(
        "test", 500, options.list_seed, **task_options(options.task)
    )
    found = Probe(
        load_backbone(model),
        load_tokenizer(tokenizer_of(options.task)),
        task,
        response_length=LENGTHS[options.task],
        policy=folder / "policy",
    )
    if not (folder / "order.json").exists():
        scores = found.order() | {
            "left_to_right": found.left_to_right(folder / "stack" / "trajectories")
        }
        write_atomically(folder / "order.json", json.dumps(scores))
    if is_timed and not (folder / "times.json").exists():
        times = {}
        for _, method in ResultFolder(folder / "stack" / "results").pairs():
            name, _, digits = method.rpartition("_")
            if name in FAMILIES:
                decoder = found.decoder(name, float(f"0.{digits[1:]}"))
                times[method] = round(found.cpu_time(decoder), 3)
        write_atomically(folder / "times.json", json.dumps(times))


def trained(options: argparse.Namespace, chain: str, seed: int) -> str:
    """Folder of a chain's weights, after whatever is missing of its stages was trained."""
    if chain == "base":
        return str(options.model)
    before, _, stage = chain.rpartition("-")
    start = trained(options, before or "base", seed)
    folder = options.out / "models" / f"{chain}-s{seed}"
    adapter = folder / "adapter"
    path = model_flags(options, start)
    length = ["--data.response_length", LENGTHS[options.task]]
    common = seed_flags(seed)
    if stage == "rl":
        adapter = folder / "policy" / "last"
        call(
            folder / "trained",
            *("fit", "--config", EXP / "tracerl_tiny.yaml", *path, *common, "--run_dir", folder),
            *("--trainer.max_epochs", options.rl_steps),
            *("--trainer.check_val_every_n_epoch", options.rl_steps, *length),
            *("--data.tasks", problem_list(options, "train", 400, 0)),
            *("--data.val_tasks", problem_list(options, "test", 500, 1)),
        )
    else:
        distilled = options.out / "distilled" / f"{before or 'base'}-s{seed}"
        call(
            distilled / "done",
            *("predict", "--config", EXP / "distill_tiny.yaml", *path, "--run_dir", distilled),
            *("--data.tasks", problem_list(options, "train", options.distil, seed), *length),
        )
        answers = {"shards": str(distilled / "traces"), "only_correct": True, "tasks": None}
        source = {"class_path": "RecordedDecodes", "init_args": answers}
        config = {"sft": "sft_sd_tiny.yaml", "tabom": "tabom_tiny.yaml"}[stage]
        call(
            folder / "trained",
            *("fit", "--config", EXP / config, *path, *common, "--run_dir", distilled),
            *("--trainer.default_root_dir", folder, "--trainer.callbacks", "[]"),
            *("--trainer.enable_checkpointing", "false", "--trainer.logger", "false"),
            *("--model.export_dir", adapter, "--data.limit", options.examples, *length),
            *("--data.sources", json.dumps([source])),
        )
    merged = folder / "model"
    if not (merged / "config.json").exists():
        merge = ["merge", start, str(merged), "--adapter", str(adapter), "--layout", "hf"]
        cli.main([*merge, "--dtype", "float32"])
    return str(merged)


def model_flags(options: argparse.Namespace, folder: str) -> list[str]:
    """Flags that name a model and its tokenizer."""
    tokenizer = ["--model.tokenizer", tokenizer_of(options.task)]
    return ["--model.backbone.init_args.path", folder, *tokenizer]


def problem_list(options: argparse.Namespace, split: str, count: int, seed: int) -> str:
    """A list of problems of the task that is stacked on, as a flag's value."""
    return problems(options.task, split, count, seed=seed, **task_options(options.task))


def read(options: argparse.Namespace) -> dict[str, Model]:
    """Results of the chains that every seed has."""
    models = {}
    for chain in CHAINS:
        folders = [options.out / f"{chain}-s{seed}" for seed in options.seeds]
        if not all((folder / "order.json").exists() for folder in folders):
            continue
        tables: list[dict[str, dict[str, Any]]] = []
        for folder in folders:
            results = ResultFolder(folder / "stack" / "results")
            tables.append(
                {
                    method: {row.uid: row for row in results.rows(task, method)}
                    for task, method in results.pairs()
                }
            )
        uids = sorted(next(iter(tables[0].values())))

        def gathered(name: str, tables: Any = tables, uids: Any = uids) -> dict[str, NDArray[Any]]:
            return {
                method: np.array(
                    [[float(getattr(table[method][uid], name)) for uid in uids] for table in tables]
                )
                for method in tables[0]
            }

        orders = [json.loads((folder / "order.json").read_text()) for folder in folders]
        timed = folders[0] / "times.json"
        clock = json.loads(timed.read_text()) if timed.exists() else {}
        digests = []
        for seed, folder, rows in zip(options.seeds, folders, tables, strict=True):
            weights = options.out / "models" / f"{chain}-s{seed}" / "model"
            records = sorted(
                f"{method} {uid} {row.trajectory['digest']}"
                for method, by_uid in rows.items()
                for uid, row in by_uid.items()
            )
            parts = {
                "weights": (options.model if chain == "base" else weights) / "model.safetensors",
                "policy": folder / "policy" / "model.safetensors",
            }
            found = {name: path.read_bytes() for name, path in parts.items()}
            found["records"] = "\n".join(records).encode()
            digests.append(
                {name: hashlib.sha256(text).hexdigest()[:12] for name, text in found.items()}
            )
        models[chain] = Model(gathered("correct"), gathered("nfe"), clock, orders, digests)
    return models


def condense(models: dict[str, Model], resamples: int = 1000) -> dict[str, Any]:
    """Accuracies at equal forwards, and what pairs of methods add to each other.

    Args:
        models: by chain.
        resamples: of problems and of seeds.

    Returns:
        ``fronts``: by chain and family, (accuracy, standard error). ``pairs``: by two names, the
        gains of each alone, of both, and of both beyond the sum of each alone, with errors.
        ``points``: every method of every chain. ``order`` and ``digests`` of each seed.
    """
    shape = next(iter(models["base"].correct.values())).shape
    generator = np.random.default_rng(0)
    draws: list[tuple[NDArray[Any], NDArray[Any]]] = [(np.arange(shape[0]), np.arange(shape[1]))]
    draws += [
        (generator.integers(shape[0], size=shape[:1]), generator.integers(shape[1], size=shape[1:]))
        for _ in range(resamples)
    ]
    known: dict[tuple[str, str, float], NDArray[Any]] = {}

    def values(chain: str, name: str, forwards: float) -> NDArray[Any]:
        """The estimate, then one of each resample."""
        key = (chain, name, forwards)
        if key not in known:
            front = models[chain].at(name, forwards)
            known[key] = np.array([front(seeds, rows) for seeds, rows in draws])
        return known[key]

    def estimate(found: NDArray[Any]) -> list[float] | None:
        if np.isnan(found[0]):
            return None
        return [round(float(found[0]), 5), round(float(np.nanstd(found[1:], ddof=1)), 5)]

    report: dict[str, Any] = {
        "fronts": {},
        "pairs": {},
        "points": {},
        "order": {chain: model.order for chain, model in models.items()},
        "digests": {chain: model.digests for chain, model in models.items()},
    }
    for chain, model in models.items():
        report["points"][chain] = {
            method: {
                "accuracy": round(float(model.correct[method].mean()), 5),
                "forwards": round(float(model.forwards[method].mean()), 3),
                "ms": model.times.get(method),
            }
            for method in model.correct
        }
        report["fronts"][chain] = {
            name: estimate(values(chain, name, at)) for name, at in FAMILIES.items()
        }
    for one, two, cells in pairs(models):
        at = max(FAMILIES[name] for _, name in cells)
        none, first, second, both = (values(chain, name, at) for chain, name in cells)
        report["pairs"][f"{one} + {two}"] = {
            "one": estimate(first - none),
            "the other": estimate(second - none),
            "both": estimate(both - none),
            "beyond the sum": estimate(both - first - second + none),
        }
    return report


def pairs(
    models: dict[str, Model],
) -> list[tuple[str, str, Sequence[tuple[str, str]]]]:
    """Pairs of methods, with the cells (chain, family) of none, one, the other and both."""
    found: list[tuple[str, str, Sequence[tuple[str, str]]]] = []
    for one, two in itertools.combinations(("sft", "tabom", "rl"), 2):
        if {one, two, f"{one}-{two}"} <= set(models):
            chains = ("base", one, two, f"{one}-{two}")
            found.append((one, two, [(chain, "threshold") for chain in chains]))
    for one, two in (
        ("tracelock", "threshold_dual"),
        *itertools.product(models, list(FAMILIES)[1:3]),
    ):
        if one == "tracelock":
            names = ("threshold", "tracelock", "threshold_dual", "tracelock_dual")
            found.append((one, "cache", [("base", name) for name in names]))
        elif one != "base":
            plain, other = ("base", one), ("threshold", two)
            cells = [(plain[0], other[0]), (plain[1], other[0]), (plain[0], other[1])]
            label = "cache" if two == "threshold_dual" else two
            found.append((one, label, [*cells, (plain[1], other[1])]))
    return found


def draw(report: dict[str, Any], path: Path) -> None:
    """Accuracies at equal forwards, without and with a cache, with two standard errors."""
    panels = {"{} forwards": ("threshold", "tracelock")}
    panels["with a cache, {} forwards"] = ("threshold_dual", "tracelock_dual")

    def figure(theme: Theme) -> Figure:
        drawn = Figure(figsize=(9.2, 3.4), layout="constrained")
        axes = drawn.subplots(1, 2, sharey=True)
        for axis, (title, names) in zip(axes, panels.items(), strict=True):
            axis.set(title=title.format(f"{FAMILIES[names[0]]:g}"), xlabel="right answers, %")
            for shift, name, style in zip(
                (0.12, -0.12), names, method_styles(names, theme), strict=True
            ):
                points = [
                    (place + shift, 100 * found[name][0], 200 * found[name][1])
                    for place, found in enumerate(report["fronts"].values())
                    if found[name]
                ]
                heights, rates, errors = zip(*points, strict=True)
                label = name.removesuffix("_dual")
                style |= {"linestyle": "none", "label": label, "capsize": 3, "markersize": 5}
                axis.errorbar(rates, heights, xerr=errors, **style)
            tidy_axes(axis)
        axes[0].set_yticks(range(len(report["fronts"])), list(report["fronts"]))
        axes[0].invert_yaxis()
        common_legend(drawn, 2)
        return drawn

    save_themes(path, figure)


def markdown(report: dict[str, Any]) -> str:
    """The report as tables, in percent and points; order scores as they are."""
    columns = [f"{name.replace('_dual', ', cache')}, {at:g}" for name, at in FAMILIES.items()]
    lines = [["model", *columns]]
    for chain, fronts in report["fronts"].items():
        lines.append([chain, *map(_shown, fronts.values())])
    more = [["pair", *next(iter(report["pairs"].values()))]]
    for pair, gains in report["pairs"].items():
        if all(gains.values()):
            more.append([pair, *(_shown(gain, "+") for gain in gains.values())])
    last = [["model", *(name.replace("_", " ") for name in report["order"]["base"][0])]]
    for chain, seeds in report["order"].items():
        last.append(
            [chain, *(f"{np.mean([seed[name] for seed in seeds]):.3f}" for name in seeds[0])]
        )
    return "\n".join(map(table, (lines, more, last)))


def _shown(found: Sequence[float] | None, sign: str = "") -> str:
    return f"{100 * found[0]:{sign}.1f} ± {100 * found[1]:.1f}" if found else "not reached"


if __name__ == "__main__":
    main()
