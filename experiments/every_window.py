"""One commit policy for every window: whole responses, blocks, and blocks with a cache.

The policy takes the windows in turn while it trains on outcomes (``method/every_window``). It
starts from the policy bench's distilled policies and decodes the bench's lists; the bench's other
policies are those that it competes with. A model has one policy, so that of ``tiny`` trains on
words and functions together. ``--trial`` compares ways to train it on fewer decodes, before:
``docs/results/every_window`` has the plan and the results. What is on disk is not made again.

    python experiments/every_window.py --out runs/policy_bench --addition runs/addition/model
        --countdown runs/countdown/model --functions runs/functions/model  # makes what is missing
    python experiments/every_window.py  # prints the tables of the published results
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
from chain import Decodes, keep_decodes, parser, points, read_decodes, table
from matplotlib.figure import Figure
from policy_bench import (
    BLOCKS,
    CONTESTS,
    LEVELS,
    LIST_SEED,
    NAME,
    NEAR,
    OURS,
    SIZE,
    TASKS,
    WINDOWS,
    Decodes as Results,
    cells,
    choice,
    collected,
    contest,
    contests,
    contests_table,
    decode,
    distil,
    fronts,
    interval,
    list_folder,
    margin,
    read,
    run_of,
    summary_table,
    swept,
    train_on_outcomes,
    validated,
    write_table,
)

from lit_dlm.reports.plots import Theme, common_legend, read_points, save_themes, tidy_axes
from lit_dlm.system.files import write_atomically

PAGES = Path(__file__).parents[1] / "docs" / "results"
MODELS = ("words+functions", "sudoku", "pictures", "addition", "countdown", "wide-functions")
"""Tasks of each model's policy."""
METHOD = ("--config", "method/every_window")
FREE = (
    *(*METHOD, "--model.constraint", "null", "--trainer.num_sanity_val_steps", 0),
    *("--model.decay_share", 0),
)
DRAWN = (
    *(*FREE, "--model.forks", "false", "--data.advantage"),
    '{"class_path": "lit_dlm.rl.advantages.GroupMean", "init_args": {"scale": 0.1, "clip": 3.0}}',
)
"""Undoes forks: decodes draw all their commits, and are compared with the mean of their group."""
CHEAP = (
    "--data.rewards",
    '["Graded", {"class_path": "ForwardPrice", "init_args": {"price": 0.003}}]',
)
ARMS: dict[str, tuple[Any, ...]] = {
    "distilled": (),
    "turns": DRAWN,
    "cheap": (*DRAWN, *CHEAP),
    "forks": FREE,
    "forks-decay": (*FREE, "--model.decay_share", 1),
    "turns-decay": (*DRAWN, "--model.decay_share", 1),
    "method": METHOD,
    "forks-slow": (*FREE, "--model.optimizer.lr", 2e-4),
    "forks-cheap": (*FREE, *CHEAP),
}
"""Flags of training by arm of the trial; all take windows in turn, ``turns`` does no more."""
IN_TURN = ("whole", "blocks-8", "cache")
TRIED = (0.9, 0.95, 0.99)
TRIAL = 75
"""RL steps of the trial, 12,000 decodes."""
STEPS = 120
"""RL steps of the bench for each task of a model, 19,200 decodes."""
DECODES = 160
"""Of an RL step."""


def main() -> None:
    """Makes what is missing, then prints the tables."""
    words = parser(__doc__, 0, 1, 2, 3, 4)
    words.add_argument("--trial", nargs="*", metavar="ARM", help="only these arms [all]")
    words.add_argument("--task", nargs="+", default=["words", "functions"], help="of --trial")
    words.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    for name in ("addition", "countdown", "functions"):
        words.add_argument(f"--{name}", help=f"folder of the {name} model, see the page")
    options = words.parse_args()
    options.list_seed, options.num_examples = LIST_SEED, SIZE
    results = options.out or PAGES / "every_window"
    if options.trial is not None:
        kept = results / "every_window_trial.parquet"
        if options.out:
            keep_decodes(kept, tried(options))
        print(trial_table(read_decodes(kept)))
        return
    kept = results / "every_window.parquet"
    if options.out:
        for model in options.models:
            make(options, model, kept)
    draw(known(kept), kept.with_suffix(".png"))
    print(report(kept))


# -- the trial -------------------------------------------------------------------------------------


def tried(options: argparse.Namespace) -> list[tuple[str, int, Path]]:
    """Makes what the trial lacks; returns arm, seed and results folder of its decodes."""
    runs = []
    for task, arm, seed in itertools.product(
        options.task, options.trial or ARMS, options.train_seeds
    ):
        folder = options.out / "every_window" / f"{task}-{arm}-s{seed}"
        policy = started(options, task, seed)
        if ARMS[arm]:
            flags = ("--trainer.max_epochs", TRIAL, "--trainer.check_val_every_n_epoch", 15)
            flags = (*ARMS[arm], *flags, "--model.policy", policy)
            train_on_outcomes(options, task, seed, folder, *flags)
            policy = folder / "every_window" / "policy" / "last"
        decode(options, task, "validation", folder, decoders(arm, policy, TRIED, IN_TURN))
        found = (list_folder(options, "validation", folder) / w / "results" for w in IN_TURN)
        runs += [(f"{task}, {arm}", seed, one) for one in found]
    return runs


def trial_table(decodes: Decodes) -> str:
    """Returns a table of every arm at threshold 0.95."""
    lines = [["task", "arm", "seeds", *IN_TURN]]
    for place in dict.fromkeys(arm for arm, *_ in decodes):
        own = {
            method.rpartition("_")[2]: found
            for (arm, _, method), found in decodes.items()
            if arm == place and "_0.95_" in method
        }
        shown = [f"{points(own[w][1], '')} @ {own[w][0].mean():.1f}" for w in IN_TURN]
        lines.append([*place.split(", "), str(len(own["whole"][1])), *shown])
    return table(lines)


# -- the bench -------------------------------------------------------------------------------------


def make(options: argparse.Namespace, model: str, kept: Path) -> None:
    """Trains a model's policies and decodes the lists of its tasks."""
    names = model.split("+")
    # Beside the bench's own runs, for the folders of its decodes have the same names.
    ours = argparse.Namespace(**{**vars(options), "out": options.out / "every_window"})
    ours.task = names
    policies = {}
    for seed in options.train_seeds:
        folder = run_of(ours, model, seed)
        start = started(options, model, seed)
        flags = (*METHOD, "--trainer.max_epochs", STEPS * len(names), "--model.policy", start)
        train_on_outcomes(options, model, seed, folder, *flags)
        policies[seed] = folder / "every_window" / "policy" / "best"
        write_curve(kept.with_suffix(".json"), model, seed, folder / "every_window")
    for name in names:
        for seed, policy in policies.items():
            every = decoders("every", policy, LEVELS, WINDOWS)
            decode(ours, name, "validation", run_of(ours, name, seed), every)
        chosen = fronts(validated(ours, name, options.train_seeds))
        for seed, policy in policies.items():
            every = decoders("every", policy, LEVELS, WINDOWS)
            every = {cell: every[cell] for cell in every if cell in chosen}
            decode(ours, name, "test", run_of(ours, name, seed), every)
    write_table(kept, collected(ours))


def started(options: argparse.Namespace, model: str, seed: int) -> Path:
    """Returns the folder of the policy to start from, distilled from traces of all tasks."""
    run = run_of(options, model, seed)
    distil(options, model, seed, run)
    return run / "policy"


def decoders(name: str, policy: Path, levels: Any, windows: Any) -> dict[str, dict[str, Any]]:
    """Returns decoders with a policy at some thresholds in some windows."""
    taken = {"path": str(policy), "max_accept_per_step": None}
    return cells({name: swept("TraceLockPolicy", "threshold", *levels, **taken)}, windows)


def write_curve(path: Path, model: str, seed: int, folder: Path) -> None:
    """Writes validation by number of decodes and window; what others wrote stays."""
    curves = json.loads(path.read_text()) if path.exists() else {}
    curves.setdefault(model, {})[str(seed)] = [
        [
            DECODES * point["step"],
            *(
                point[f"val/evaluation_{window}/{measure}"]
                for window in ("whole", "blocks", "cache")
                for measure in ("accuracy", "num_steps")
            ),
        ]
        for point in read_points(folder / "reward_curve.jsonl")
        if "val/evaluation_whole/accuracy" in point
    ]
    write_atomically(path, json.dumps(curves) + "\n")


def curve_table(curves: dict[str, Any]) -> str:
    """Accuracy @ forwards on the validation list by decodes of a task, means over seeds."""
    at = (3_200, 6_400, 9_600, 12_800, 16_000, 19_200)
    lines = [["model's tasks", "window", *(f"{count:,}" for count in at)]]
    for model, seeds in curves.items():
        size = len(model.split("+"))
        for column, window in enumerate(("whole", "blocks", "blocks with a cache")):
            entries = []
            for count in at:
                near = [min(one, key=lambda p: abs(p[0] - size * count)) for one in seeds.values()]
                rate, steps = np.mean([p[1 + 2 * column : 3 + 2 * column] for p in near], axis=0)
                entries.append(f"{100 * rate:.1f} @ {steps:.1f}")
            lines.append([model, window, *entries])
    return table(lines)


def beside_table(results: dict[tuple[str, str], Results]) -> str:
    """Returns right @ forwards of this policy, and of the one trained for that kind of windows.

    Each is at its most accurate setting in validation; ``wide-functions`` has no other.
    """
    lines: dict[str, list[str]] = {}
    for (task, which), test in results.items():
        for windows in CONTESTS.values() if which == "test" else ():
            entry = []
            for policy in reversed(OURS):
                own = [cell for cell in test.correct if cell[0] == policy and cell[1] in windows]
                if own:
                    forwards, rate = test.point(choice(results[task, "validation"], own, 0.0))
                    entry.append(f"{100 * rate:.1f} @ {forwards:.1f}")
            lines.setdefault(task, [task]).append("; ".join(entry))
    return table([["", *CONTESTS], *(lines[task] for task in TASKS if task in lines)])


def lengths_table(results: dict[tuple[str, str], Results]) -> str:
    """Returns contests of both sides in blocks of one length alone, where this policy was decoded.

    They do not belong to the plan, and are not corrected for their number.
    """
    lines: dict[str, list[str]] = {}
    for task, length in itertools.product(TASKS, BLOCKS):
        if (task, "test") in results:
            lists = results[task, "validation"], results[task, "test"]
            found = contest(*lists, (f"blocks-{length}",), policy="every")
            entry = ""
            if found is not None:
                _, forwards, rate, _ = found["ours"]
                entry = f"{100 * rate:.1f} @ {forwards:.1f}, {interval(*found['difference'])}"
            lines.setdefault(task, [task]).append(entry)
    return table([["", *(f"blocks of {length}" for length in BLOCKS)], *lines.values()])


def known(kept: Path) -> dict[tuple[str, str], Results]:
    """Reads both lists of the tasks that this policy decoded, with all policies of the bench."""
    everything = read(PAGES / "policies" / NAME, kept)
    return {
        (task, which): found
        for (task, which), found in everything.items()
        if any(cell[0] == "every" for cell in everything[task, "test"].correct)
    }


def draw(results: dict[tuple[str, str], Results], path: Path) -> None:
    """Draws all contests: the difference to the best of the others in points, 95 % intervals."""
    sides = {"most accurate setting": 0.0, "fastest within a point of it": NEAR}

    def figure(theme: Theme) -> Figure:
        found = [contests(results, within, "every") for within in sides.values()]
        drawn = Figure(figsize=(7.0, 0.27 * len(found[0]) + 1.2), layout="constrained")
        axis = drawn.subplots()
        for number, (label, rows) in enumerate(zip(sides, found, strict=True)):
            values = [one["difference"] for _, _, one, _ in rows]
            axis.errorbar(
                [100 * mean for mean, *_ in values],
                np.arange(len(rows)) + 0.3 * number - 0.15,
                xerr=[100 * margin(error, freedom) for _, error, freedom in values],
                label=label,
                color=theme.series[(1, 5)[number]],
                fmt="os"[number],
                markersize=4,
                elinewidth=1,
            )
        axis.axvline(0.0, color=theme.muted, linewidth=1)
        names = [f"{task}, {kind}" for task, kind, *_ in found[0]]
        axis.set_yticks(np.arange(len(names)), names)
        axis.invert_yaxis()
        axis.set_xlabel("points more than the best of all others at equal forwards")
        tidy_axes(axis)
        common_legend(drawn, 2)
        return drawn

    save_themes(path, figure)


def report(kept: Path) -> str:
    """Returns all tables: contests, the policies of one kind of windows, and the curves."""
    results = known(kept)
    tables = [
        contests_table(results, policy="every"),
        summary_table(results, NEAR, policy="every"),
        lengths_table(results),
        beside_table(results),
        curve_table(json.loads(kept.with_suffix(".json").read_text())),
    ]
    return "\n".join(tables)


if __name__ == "__main__":
    main()
