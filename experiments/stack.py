"""What fine-tuning, reinforcement learning, a learned policy and a cache add to each other.

Models are chains of stages, each trained on what the model before it decoded: ``sft`` (on its own
right answers), ``tabom`` (the same answers with their order) and ``rl`` (TraceRL); ``full`` is the
model as it ships, trained to the end. Every model gets a TraceLock policy that is trained on its
own traces; in three of them another one goes on from it on outcomes. All decode one fresh list of
problems from left to right, with thresholds and with their policies, with and without a cache.

    lit-dlm fit --config exp/pretrain_tiny --run_dir runs/weak --trainer.max_steps 1400
    python experiments/stack.py --model runs/weak/model --out runs/stack  # makes what is missing
    python experiments/stack.py  # tables and picture of the published results

Methods are compared at the same mean forwards, on the line between the two neighbouring points of
their front: each problem is decoded by one or the other, by chance. Pairs with a cache are compared
at its forwards. Several processes may make different ``--chains`` and ``--train_seeds`` of one
folder; the last one then collects all.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

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
    recorded,
    seed_flags,
    standard_error,
    table,
)
from matplotlib.figure import Figure
from numpy.typing import NDArray
from policy_bench import SIZE, cells, decode, list_folder, swept, top

from lit_dlm import cli
from lit_dlm.reports.plots import Theme, common_legend, method_styles, save_themes, tidy_axes

CHAINS = ("base", "sft", "tabom", "rl", "sft-tabom", "sft-rl", "tabom-rl", "sft-tabom-rl", "full")
"""Models: their stages in order, ``base`` without any."""

WITH_OUTCOMES = ("base", "sft-tabom-rl", "full")
"""Models that get a policy from outcomes, which takes as long as the rest."""

AT = {"whole": 11.0, "cache": 13.0}
"""Windows, and at how many forwards methods are compared there: all fronts reach these."""

POLICIES = ("threshold", "tracelock", "outcome")
FRONTS = tuple((p, w) for w in AT for p in POLICIES if (p, w) != ("outcome", "cache"))
"""Policies and windows; on outcomes a policy is trained for one window, here whole responses."""

THRESHOLDS = {"whole": (0.6, 0.7, 0.8, 0.9, 0.95), "cache": (0.7, 0.8, 0.9, 0.95)}
LEVELS = {"whole": (0.5, 0.8, 0.9, 0.95, 0.99), "cache": (0.9, 0.95, 0.99)}
"""Thresholds of the learned policies."""


def main() -> None:
    """Makes what is missing, then tables and picture."""
    words = parser(__doc__, 0, 1)
    words.add_argument("--model", help="folder of the model to start from")
    words.add_argument("--chains", nargs="+", choices=CHAINS, default=list(CHAINS))
    options = words.parse_args()
    options.list_seed, options.num_examples = 31, SIZE
    kept = (options.out or Path("docs/results/stack")) / "stack.parquet"
    if options.out:
        if not options.model:
            words.error("--model: needed for runs")
        runs = [
            (chain, seed, results)
            for seed, chain in itertools.product(options.train_seeds, options.chains)
            for results in measure(options, chain, seed)
        ]
        keep_decodes(kept, runs)
    decodes = read_decodes(kept)
    draw(decodes, kept.with_suffix(".png"))
    print(markdown(decodes))


def measure(options: argparse.Namespace, chain: str, seed: int) -> list[Path]:
    """Trains a model and its policies, decodes the test list, and returns folders of results."""
    folder = options.out / f"{chain}-s{seed}"
    path = model_flags("tiny" if chain == "full" else trained(options, chain, seed))
    seeds = ["--seed_everything", seed, "--model.seed", seed]
    call(
        folder / "traced",
        *("predict", "--config", "exp/generate_tiny", *path, *seeds, "--run_dir", folder),
        *("--data.tasks", problems("WordProblems", "train", 1600, seed=seed)),
    )
    call(
        folder / "distilled",
        *("fit", "--config", "exp/tracelock_tiny", *path, *seed_flags(seed)),
        *("--run_dir", folder, "--ckpt_path", "last"),
    )
    places = {"tracelock": "policy"}
    if chain in WITH_OUTCOMES:
        places["outcome"] = "outcome/policy/best"
        call(
            folder / "outcome" / "done",
            *("fit", "--config", "exp/tracelock_outcome_tiny", *path, *seed_flags(seed)),
            *("--run_dir", folder, "--ckpt_path", "last", "--trainer.max_epochs", 40),
            *("--data.tasks", problems("WordProblems", "train", 4000, seed=1000 + seed)),
            *("--data.val_tasks", problems("WordProblems", "train", 300, seed=100)),
        )
    decoders = cells({"left-to-right": top("SequentialPolicy", 1)}, ["whole"])
    for window in AT:
        policies = {"threshold": swept("ThresholdPolicy", "threshold", *THRESHOLDS[window])}
        for name, place in places.items():
            if (name, window) not in FRONTS:
                continue
            taken = {"path": str(folder / place), "max_accept_per_step": None}
            policies[name] = swept("TraceLockPolicy", "threshold", *LEVELS[window], **taken)
        decoders |= cells(policies, [window])
    decode(options, "words", "test", folder, decoders, *path)
    return [list_folder(options, "test", folder) / window / "results" for window in AT]


def trained(options: argparse.Namespace, chain: str, seed: int) -> str:
    """Trains whatever is missing of a chain's stages; returns the folder of its weights."""
    if chain == "base":
        return str(options.model)
    before, _, stage = chain.rpartition("-")
    start = trained(options, before or "base", seed)
    folder = options.out / "models" / f"{chain}-s{seed}"
    adapter, path = folder / "adapter", model_flags(start)
    if stage == "rl":
        adapter = folder / "policy" / "last"
        call(
            folder / "trained",
            *("fit", "--config", "exp/tracerl_tiny", *path, *seed_flags(seed)),
            *("--run_dir", folder, "--ckpt_path", "last"),
            *("--trainer.check_val_every_n_epoch", 12),
            *("--data.val_tasks", problems("WordProblems", "train", 300, seed=100)),
        )
    else:
        own = options.out / "distilled" / f"{before or 'base'}-s{seed}"
        call(
            own / "done",
            *("predict", "--config", "exp/distill_tiny", *path, "--run_dir", own),
            *("--data.tasks", problems("WordProblems", "train", 4000, seed=seed)),
        )
        method = ["exp/tabom_tiny"]
        if stage == "sft":
            method = ["exp/sft_gt_tiny", "--config", "data/own_answers_tiny"]
        call(
            folder / "trained",
            *("fit", "--config", *method, *path, *seed_flags(seed), "--run_dir", own),
            *("--trainer.default_root_dir", folder, *BARE, "--model.export_dir", adapter),
            *("--data.limit", 1800, "--data.sources", recorded(own)),
        )
    merged = folder / "model"
    if not (merged / "config.json").exists():
        merge = ["merge", start, str(merged), "--adapter", str(adapter), "--layout", "hf"]
        cli.main([*merge, "--dtype", "float32"])
    return str(merged)


def model_flags(folder: str) -> list[str]:
    """Returns the flags that name a model."""
    return ["--model.backbone.init_args.path", folder]


def at(
    decodes: Decodes, forwards: float, chain: str, policy: str, window: str
) -> NDArray[Any] | None:
    """What a policy gets right at a mean number of forwards: ``(seeds, problems)``, from 0 to 1.

    A front that ends with fewer forwards is taken at its end. ``None`` where there is no front, or
    it begins with more.
    """
    front = [
        values
        for (arm, _, cell), values in decodes.items()
        if arm == chain and cell.startswith(f"{policy}_") and cell.endswith(f"_{window}")
    ]
    if not front:
        return None
    most, right = max(front, key=lambda values: values[0].mean())
    return right if most.mean() < forwards else between(front, forwards)


def pairs() -> dict[str, list[tuple[str, str, str]]]:
    """Returns cells (chain, policy, window) of neither, one, the other and both of two methods."""
    found = {}
    for one, two in itertools.combinations(("sft", "tabom", "rl"), 2):
        chains = ("base", one, two, f"{one}-{two}")
        found[f"{one} + {two}"] = [(chain, "threshold", "whole") for chain in chains]
    of = itertools.product(["base"], AT, ("threshold", "tracelock"))
    found["tracelock + cache"] = [(chain, name, window) for chain, window, name in of]
    for one in CHAINS[1:-1]:
        for policy in POLICIES[1:]:
            of = itertools.product(("threshold", policy), ("base", one), ["whole"])
            found[f"{one} + {policy}"] = [(chain, name, window) for name, chain, window in of]
        of = itertools.product(["threshold"], AT, ("base", one))
        found[f"{one} + cache"] = [(chain, name, window) for name, window, chain in of]
    return found


def markdown(decodes: Decodes) -> str:
    """Returns tables: models by method in per cent, and what pairs of methods add, in points."""
    chains = [chain for chain in CHAINS if any(key[0] == chain for key in decodes)]
    heads = [f"{p}{', cache' if w == 'cache' else ''} @ {AT[w]:g}" for p, w in FRONTS]
    lines = [["model", "left to right @ 32", *heads]]
    for chain in chains:
        (name,) = {task for arm, task, _ in decodes if arm == chain}
        shown = [points(decodes[chain, name, "left-to-right_1_whole"][1], "")]
        for policy, window in FRONTS:
            right = at(decodes, AT[window], chain, policy, window)
            shown.append("" if right is None else points(right, ""))
        lines.append([chain, *shown])
    more = [["pair", "one", "the other", "both", "beyond the sum"]]
    for pair, of in pairs().items():
        forwards = max(AT[window] for *_, window in of)
        rights = [right for cell in of if (right := at(decodes, forwards, *cell)) is not None]
        if len(rights) == 4:
            none, one, two, both = rights
            gains = (one - none, two - none, both - none, both - one - two + none)
            more.append([pair, *map(points, gains)])
    return table(lines) + "\n" + table(more)


def draw(decodes: Decodes, path: Path) -> None:
    """Draws right answers at equal forwards, without and with a cache, with two standard errors."""
    chains = [chain for chain in CHAINS if any(key[0] == chain for key in decodes)]

    def figure(theme: Theme) -> Figure:
        drawn = Figure(figsize=(9.2, 3.4), layout="constrained")
        axes = drawn.subplots(1, 2, sharey=True)
        for axis, (window, forwards) in zip(axes, AT.items(), strict=True):
            title = f"{forwards:g} forwards{' with a cache' if window == 'cache' else ''}"
            axis.set(title=title, xlabel="right answers, %")
            styles = method_styles(POLICIES, theme)
            for shift, policy, style in zip((-0.2, 0.0, 0.2), POLICIES, styles, strict=True):
                rights = {
                    height: right
                    for height, chain in enumerate(chains)
                    if (right := at(decodes, forwards, chain, policy, window)) is not None
                }
                style |= {"linestyle": "none", "label": policy, "capsize": 3, "markersize": 5}
                axis.errorbar(
                    [100 * right.mean() for right in rights.values()],
                    [height + shift for height in rights],
                    xerr=[200 * standard_error(right) for right in rights.values()],
                    **style,
                )
            tidy_axes(axis)
        axes[0].set_yticks(range(len(chains)), chains)
        axes[0].invert_yaxis()
        common_legend(drawn, 3)
        return drawn

    save_themes(path, figure)


if __name__ == "__main__":
    main()
