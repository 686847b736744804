"""What every commit policy is worth: accuracy against forwards, in three kinds of windows.

Settings are chosen on a validation list and reported on a test list of distinct problems; learned
policies are trained with several seeds. ``docs/results/policies`` has the plan, which was written
before the runs, and the results. Everything runs through the
command line. What is on disk is not made again, so an interrupted run resumes; several processes
can share the work, each with its own values of ``--task`` and its own ``--results``.

    python experiments/policy_bench.py --out runs/policy_bench  # makes what is missing
    python experiments/policy_bench.py  # prints and draws the published results

``--extra`` decodes the validation lists with policies from a file, which belong neither to the plan
nor to the contests. ``experiments/taking_back.yaml`` is one, with a page of results:

    python experiments/policy_bench.py --out runs/policy_bench --task words functions
        --extra experiments/taking_back.yaml --results docs/results/take_back/taking_back.parquet
    python experiments/policy_bench.py --listed --results docs/results/take_back/taking_back.parquet
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml
from chain import (
    CONFIGS,
    call,
    degrees_of_freedom,
    parser,
    seed_flags,
    standard_error,
    student,
    table,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from lit_dlm.reports.plots import Theme, common_legend, read_points, save_themes, tidy_axes
from lit_dlm.reports.results import ResultFolder, ResultRow
from lit_dlm.reports.significance import holm
from lit_dlm.system.files import write_atomically
from lit_dlm.trajectories.store import TrajectoryShardReader


@dataclass(frozen=True)
class Task:
    """A list of problems and the model that solves it."""

    domain: str | None  # files in configs/domain, if the model is not that of the experiments
    backbone: str  # its file in configs/backbone
    name: str  # class of the task
    length: int  # response cells
    options: dict[str, Any] = field(default_factory=dict)  # of the task
    traces: int = 1600  # training problems that are traced
    prompts: int = 4000  # training problems for outcomes
    split: str = "train"  # of traces and training
    validation: str = "train"
    model: str | None = None  # option with the folder of a model that does not ship

    def overlay(self, part: str = "") -> list[str]:
        """Returns the flags of the domain's file for a part of the work."""
        return ["--config", f"domain/{self.domain}{part}"] if self.domain else []


TASKS = {
    "words": Task(None, "tiny", "WordProblems", 32),
    "functions": Task(
        None, "tiny", "PythonFunctions", 32, {"allow_code_execution": True}, traces=700
    ),
    "sudoku": Task("planning", "tiny_planning", "Sudoku", 20, traces=5000),
    "pictures": Task(
        "pictures",
        "tiny_pictures",
        "PictureQuestions",
        17,
        {"kind": "sum"},
        split="validation",
        validation="validation",
    ),
    "addition": Task("addition", "tiny", "Addition", 10, model="addition"),
    "countdown": Task(
        "planning",
        "tiny_planning",
        "Countdown",
        56,
        {"style": "worked", "counts": [3]},
        model="countdown",
    ),
    "wide-functions": Task(
        None,
        "tiny",
        "WideFunctions",
        32,
        {"allow_code_execution": True},
        traces=700,
        validation="validation",
        model="functions",
    ),
}


def first_task(name: str) -> Task:
    """Returns the task that names the model of several, joined by ``+``."""
    return TASKS[name.partition("+")[0]]


BLOCKS = (2, 4, 8, 16)
TRAINED_BLOCK = 8
"""Block length with which policies are trained that decode in blocks of any size."""


def block(size: int, **more: Any) -> dict[str, Any]:
    """Returns a window of blocks, as a part of a decoder."""
    return {"window": {"class_path": "BlockWindow", "init_args": {"block_length": size}}, **more}


WINDOWS: dict[str, dict[str, Any]] = {
    "whole": {},
    **{f"blocks-{size}": block(size) for size in BLOCKS},
    "cache": block(TRAINED_BLOCK, cache={"class_path": "DualCache"}),
}


def top(policy: str, *counts: int) -> dict[str, dict[str, Any]]:
    """Returns decoders that commit a fixed number of tokens per step in a policy's order."""
    quota = {"class_path": "FixedQuota"}
    return {
        f"{count}": {"policy": policy, "quota": {**quota, "init_args": {"tokens_per_step": count}}}
        for count in counts
    }


def swept(policy: str, option: str, *values: float, **more: Any) -> dict[str, dict[str, Any]]:
    """Returns decoders with a policy at several values of an option, without a quota."""
    return {
        f"{value:g}": {
            "policy": {"class_path": policy, "init_args": {**more, option: value}},
            "quota": "NoQuota",
        }
        for value in values
    }


POLICIES: dict[str, dict[str, dict[str, Any]]] = {
    "random": top("RandomPolicy", 1, 2),
    "left-to-right": top("SequentialPolicy", 1, 2, 3, 4),
    "confidence": top("ConfidencePolicy", 1, 2, 3, 4),
    "entropy": top("EntropyPolicy", 1, 2, 3, 4),
    "margin": top("MarginPolicy", 1, 2, 3, 4),
    "threshold": swept("ThresholdPolicy", "threshold", 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99),
    "factor": swept("FactorPolicy", "factor", 0.1, 0.2, 0.35, 0.5, 0.75, 1.0),
    "entropy-bounded": swept("EntropyBoundedPolicy", "bound", 0.02, 0.05, 0.1, 0.2, 0.35, 0.5),
    "eb-sampler": swept("EBSamplerPolicy", "bound", 0.002, 0.005, 0.01, 0.03, 0.1),
    "klass": swept("KLASSPolicy", "threshold", 0.6, 0.8, 0.9, 0.95),
    "credit": swept("CreditPolicy", "threshold", 0.8, 0.9, 0.95, 0.99),
    "pc-sampler": {
        f"{decay:g}": {
            "policy": {"class_path": "PCSamplerPolicy", "init_args": {"decay": decay}},
            "quota": "FixedQuota",
        }
        for decay in (0.0, 0.25, 0.5)
    },
}
"""Rules (policies without training), with the settings that validation chooses from."""

LEARNT = {"tracelock": "policy", "outcome": "outcome/policy/best"}
"""Folder of each learned policy in a seed's run; for ``outcome``, below ``whole`` or ``blocks``."""
LEVELS = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99)
"""Thresholds of the learned policies."""

SCHEMA = pa.schema(
    {
        **dict.fromkeys(
            ("task", "list", "policy", "window", "setting"), pa.dictionary(pa.int16(), pa.string())
        ),
        "seed": pa.int8(),  # of training; -1 for rules
        "uid": pa.string(),
        "correct": pa.bool_(),
        "forwards": pa.int16(),
        # Of decoding on one thread, and of these the policy's: means over the cell, since the rows
        # of a batch share its time.
        "seconds": pa.float32(),
        "policy_seconds": pa.float32(),
        "digest": pa.dictionary(pa.int16(), pa.string()),  # of all settings of the cell
    }
)
"""One row for each decode."""
NAME = "policy_bench.parquet"
ROLLOUTS = 320
"""Decodes per RL step of ``tracelock_outcome_*``."""
LIST_SEED, SIZE = 17, 1000
"""Of the test list."""


def main() -> None:
    """Makes what is missing, then reports what is there."""
    words = parser(__doc__, 0, 1, 2, 3, 4)
    words.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    for name in ("addition", "countdown", "functions"):
        words.add_argument(f"--{name}", help=f"folder of the {name} model, see the page")
    words.add_argument("--results", type=Path, help="one row a decode [in OUT, or beside the page]")
    words.add_argument(
        "--extra",
        type=Path,
        help="YAML of other policies than those of the plan: by name and setting the parts of a "
        "decoder; only they are decoded, on the validation lists, in a folder of their own",
    )
    words.add_argument(
        "--windows", nargs="+", choices=WINDOWS, default=["whole", "blocks-8"], help="of --extra"
    )
    words.add_argument("--learnt", nargs="+", choices=LEARNT, default=list(LEARNT))
    words.add_argument("--listed", action="store_true", help="prints every validated cell alone")
    words.add_argument(
        "--seed", type=int, default=LIST_SEED, dest="list_seed", help="of test lists"
    )
    words.add_argument("--num_examples", type=int, default=SIZE, help="of test lists")
    options = words.parse_args()
    if options.extra is not None:
        if options.out is None or options.results is None:
            words.error("--extra: needs --out and --results, which keep it from the contests")
        options.out, options.listed = options.out / options.extra.stem, True
    results = options.results or (options.out or Path("docs/results/policies")) / NAME
    if options.out is not None:
        for name in options.task:
            needed = TASKS[name].model
            if needed and getattr(options, needed) is None:
                words.error(f"--{needed}: needed for task {name}, see the page")
            if options.extra is not None:
                extra = yaml.safe_load(options.extra.read_text(encoding="utf-8"))
                folder = run_of(options, name, -1)
                decode(options, name, "validation", folder, cells(extra, options.windows))
            else:
                make(options, name)
                if "outcome" in options.learnt:
                    write_curves(results.with_suffix(".json"), options, name)
            write_table(results, collected(options))
    if options.listed:
        print(listing(results))
    else:
        report(results)


# -- runs ------------------------------------------------------------------------------------------


def make(options: argparse.Namespace, name: str) -> None:
    """Trains the policies of one task and decodes its two lists."""
    for seed in options.train_seeds:
        train(options, name, seed)
    policies = copy.deepcopy(POLICIES)
    for components in policies["pc-sampler"].values():
        components["policy"]["init_args"]["background"] = token_counts(
            run_of(options, name, options.train_seeds[0])
        )
    rules, folder = cells(policies, WINDOWS), run_of(options, name, -1)
    decode(options, name, "validation", folder, rules)
    chosen = fronts(validated(options, name, [-1]))
    decode(options, name, "test", folder, {cell: rules[cell] for cell in rules if cell in chosen})
    folders = [run_of(options, name, seed) for seed in options.train_seeds]
    for folder in folders:
        decode(options, name, "validation", folder, learnt(folder, options.learnt))
    chosen = fronts(validated(options, name, options.train_seeds))
    for folder in folders:
        decoders = learnt(folder, options.learnt)
        decode(options, name, "test", folder, {c: decoders[c] for c in decoders if c in chosen})


def cells(
    policies: dict[str, dict[str, dict[str, Any]]], windows: Iterable[str]
) -> dict[str, dict[str, Any]]:
    """Returns decoders for all settings of some policies in some windows."""
    return {
        f"{policy}_{setting}_{window}": {**components, **WINDOWS[window]}
        for policy, settings in policies.items()
        for (setting, components), window in itertools.product(settings.items(), windows)
    }


def learnt(folder: Path, policies: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns decoders with the learned policies of one training seed."""
    return {
        f"{policy}_{level:g}_{window}": {
            "policy": {
                "class_path": "TraceLockPolicy",
                "init_args": {
                    "path": str(folder / trained_for(policy, window)),
                    "threshold": level,
                    "max_accept_per_step": None,
                },
            },
            "quota": "NoQuota",
            **WINDOWS[window],
        }
        for policy, level, window in itertools.product(policies, LEVELS, WINDOWS)
    }


def trained_for(policy: str, window: str) -> str:
    """Returns the folder, within a seed's run, of the learned policy for a window."""
    if policy == "tracelock":
        return LEARNT[policy]
    return f"{'whole' if window == 'whole' else 'blocks'}/{LEARNT[policy]}"


def problem_list(name: str, split: str, count: int | str, seed: int) -> str:
    """A list of problems as a flag's value.

    ``name`` may join several tasks by ``+``; ``split`` and ``count`` may name fields of a task.
    """
    parts = []
    for task in map(TASKS.__getitem__, name.split("+")):
        values = {
            "split": getattr(task, split, split),
            "num_examples": count if isinstance(count, int) else getattr(task, count),
            "seed": seed,
            **task.options,
        }
        parts.append({"class_path": task.name, "init_args": values})
    return json.dumps(parts)


def model_flags(options: argparse.Namespace, name: str) -> list[Any]:
    """Returns the flags of a task's model, if it does not ship."""
    model = first_task(name).model
    return ["--model.backbone.init_args.path", getattr(options, model)] if model else []


def train(options: argparse.Namespace, name: str, seed: int) -> None:
    """Makes traces, distils a policy from them, and trains it further on outcomes."""
    folder = run_of(options, name, seed)
    distil(options, name, seed, folder)
    for kind in ("whole", "blocks") if "outcome" in options.learnt else ():
        flags = [] if kind == "whole" else decoder_flags(block(TRAINED_BLOCK))
        train_on_outcomes(
            options, name, seed, folder / kind, "--model.policy", folder / "policy", *flags
        )


def distil(options: argparse.Namespace, name: str, seed: int, folder: Path) -> None:
    """Makes traces, and trains a policy on them."""
    task, model = first_task(name), model_flags(options, name)
    call(
        folder / "traced",
        *("predict", "--config", "exp/generate_tiny", *task.overlay("_train"), *model),
        *("--seed_everything", seed, "--model.seed", seed, "--data.response_length", task.length),
        *("--data.tasks", problem_list(name, "split", "traces", seed), "--run_dir", folder),
    )
    call(
        folder / "distilled",
        *("fit", "--config", "exp/tracelock_tiny", *task.overlay(), *model, *seed_flags(seed)),
        *("--run_dir", folder, "--ckpt_path", "last"),
    )


def decoder_flags(components: dict[str, Any]) -> list[str]:
    """Returns flags that set parts of the decoders for rollouts and validation."""
    return [
        word
        for decoder, (part, value) in itertools.product(
            ("rollout", "evaluation"), components.items()
        )
        for word in (f"--model.decoders.{decoder}.init_args.{part}", json.dumps(value))
    ]


def train_on_outcomes(
    options: argparse.Namespace, name: str, seed: int, folder: Path, *flags: object
) -> None:
    """Trains the policy named by flags on the outcomes of its decodes of training problems."""
    task = first_task(name)
    call(
        folder / "done",
        *("fit", "--config", "exp/tracelock_outcome_tiny", *task.overlay("_outcome")),
        *seed_flags(seed),
        *(*model_flags(options, name), "--run_dir", folder, "--ckpt_path", "last"),
        *("--data.response_length", task.length, *flags),
        *("--data.tasks", problem_list(name, "split", "prompts", 1000 + seed)),
        *("--data.val_tasks", problem_list(name, "validation", 300, 100)),
    )


def token_counts(folder: Path) -> str:
    """Returns the file of token counts in a run's recorded answers: PC-Sampler's corpus."""
    path = folder / "token_counts.json"
    if not path.exists():
        records = TrajectoryShardReader(folder / "traces", features=False)
        counts = Counter(token for record in records for token in record.tokens.tolist())
        table = {"num_token": counts.total(), "p_baseline_dict": counts}
        write_atomically(path, json.dumps(table))
    return str(path)


def decode(
    options: argparse.Namespace,
    name: str,
    which: str,
    by: Path,
    decoders: dict[str, Any],
    *flags: object,
) -> None:
    """Decodes one of the lists with some decoders, with one command per window."""
    task = TASKS[name]
    split, count, list_seed = (task.validation, 300, 101)
    if which == "test":
        split, count, list_seed = ("test", options.num_examples, options.list_seed)
    for window in WINDOWS:  # a configuration may not hold all of them at once
        here = {
            cell: components for cell, components in decoders.items() if cell.endswith(f"_{window}")
        }
        if not here:
            continue
        folder = list_folder(options, which, by) / window
        config = {
            "defaults": str(CONFIGS / "method" / "benchmark.yaml"),
            "model": {
                "init_args": {
                    "backbone": str(CONFIGS / "backbone" / f"{task.backbone}.yaml"),
                    "tokenizer": task.backbone.replace("_", "-"),
                    "decoders": here,
                }
            },
            "data": {"init_args": {"batch_size": 100}},
        }
        path = folder / "decoders.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(config, indent=1))
        call(
            folder / f"done-{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}",
            *("predict", "--config", path, *model_flags(options, name), "--run_dir", folder),
            *(*flags, "--data.response_length", task.length),
            *("--data.tasks", problem_list(name, split, count, list_seed)),
        )


def run_of(options: argparse.Namespace, name: str, seed: int) -> Path:
    """Folder of the rules (-1) or of the policies of a seed."""
    found: Path = options.out / name / ("rules" if seed < 0 else f"seed-{seed}")
    return found


def list_folder(options: argparse.Namespace, which: str, by: Path) -> Path:
    """Returns the folder, below that of rules or of a seed, for the decodes of a list."""
    test = f"test-{options.list_seed}-{options.num_examples}"
    return by / (which if which == "validation" else test)


Points = dict[str, tuple[float, float]]  # by cell: mean forwards, accuracy


def results(
    options: argparse.Namespace, name: str, which: str, seed: int
) -> Iterator[tuple[str, list[ResultRow], dict[str, Any]]]:
    """Yields the decoded cells of a list, with their rows in order of uid and their settings."""
    for window in WINDOWS:
        found = ResultFolder(
            list_folder(options, which, run_of(options, name, seed)) / window / "results"
        )
        for task, cell in found.pairs() if found.folder.exists() else ():
            rows = sorted(found.rows(task, cell), key=lambda row: row.uid)
            yield cell, rows, found.settings(task, cell)


def validated(options: argparse.Namespace, name: str, seeds: Sequence[int]) -> Points:
    """Returns mean forwards and accuracy of cells on the validation list, over all seeds."""
    decodes: dict[str, list[tuple[float, float]]] = {}
    for seed in seeds:
        for cell, rows, _ in results(options, name, "validation", seed):
            decodes.setdefault(cell, []).extend((row.nfe, row.correct) for row in rows)
    return {cell: tuple(np.mean(pairs, axis=0).tolist()) for cell, pairs in decodes.items()}


def fronts(points: Points) -> set[str]:
    """Returns the Pareto-optimal cells of every policy in every kind of windows.

    A better cell is as accurate with fewer forwards, or as fast and more accurate.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for cell in sorted(points, key=lambda cell: (points[cell][0], -points[cell][1])):
        policy, _, window = cell.split("_")
        kind = next(name for name, windows in CONTESTS.items() if window in windows)
        front = found.setdefault((policy, kind), [])
        if not front or points[cell][1] > points[front[-1]][1]:
            front.append(cell)
    return set(itertools.chain(*found.values()))


# -- results ---------------------------------------------------------------------------------------


def collected(options: argparse.Namespace) -> pa.Table:
    """Returns the decodes that are there, one row each."""
    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    for name, which, seed in itertools.product(
        options.task, ("validation", "test"), (-1, *options.train_seeds)
    ):
        for cell, rows, settings in results(options, name, which, seed):
            policy, setting, window = cell.split("_")
            digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
            times = np.mean([(row.seconds, row.policy_seconds) for row in rows], 0)
            for row in rows:
                labels = (name, which, policy, window, setting, seed)
                values = (*labels, row.uid, row.correct, row.nfe, *times, digest[:12])
                for column, value in zip(columns.values(), values, strict=True):
                    column.append(value)
    return pa.table(columns, schema=SCHEMA)


def write_table(path: Path, rows: pa.Table) -> None:
    """Writes results; those of other tasks stay in the file."""
    if path.exists():
        former = pq.read_table(path)
        redone = pc.is_in(former["task"].cast(pa.string()), rows["task"].cast(pa.string()).unique())
        rows = pa.concat_tables([former.filter(pc.invert(redone)), rows]).unify_dictionaries()
    keys = rows.group_by(["task", "list", "policy", "window", "setting", "seed", "uid"])
    assert keys.aggregate([]).num_rows == rows.num_rows, "a decode appears twice"
    draft = path.with_suffix(".draft")
    pq.write_table(rows, draft, compression="zstd", compression_level=19)
    draft.replace(path)


def write_curves(path: Path, options: argparse.Namespace, name: str) -> None:
    """Writes validation accuracy and forwards by number of rollouts; other tasks' curves stay."""
    curves = json.loads(path.read_text()) if path.exists() else {}
    curves[name] = {
        kind: [
            [
                (ROLLOUTS * point["step"], point["val/accuracy"], point["val/num_steps"])
                for point in read_points(
                    run_of(options, name, seed) / kind / "outcome" / "reward_curve.jsonl"
                )
                if "val/accuracy" in point
            ]
            for seed in options.train_seeds
        ]
        for kind in ("whole", "blocks")
    }
    write_atomically(path, json.dumps(curves) + "\n")


Cell = tuple[str, str, str]  # policy, window, setting


@dataclass
class Decodes:
    """Verdicts and forwards of one list of one task by cell: arrays of shape (seeds, problems)."""

    correct: dict[Cell, NDArray[Any]]
    forwards: dict[Cell, NDArray[Any]]
    shares: dict[Cell, float]  # of decoding time that the policy took

    def point(self, cell: Cell) -> tuple[float, float]:
        """Mean forwards and accuracy."""
        return float(self.forwards[cell].mean()), float(self.correct[cell].mean())


def read(*paths: Path) -> dict[tuple[str, str], Decodes]:
    """Reads results by task and list; leaves out cells that some seeds lack."""
    frame = pa.concat_tables(map(pq.read_table, paths)).unify_dictionaries().to_pandas()
    found = {}
    for key, rows in frame.groupby(["task", "list"], observed=True):
        most = rows.seed[rows.seed >= 0].nunique()
        one = Decodes({}, {}, {})
        for cell, part in rows.groupby(["policy", "window", "setting"], observed=True):
            part = part.sort_values(["seed", "uid"])
            seeds = part.seed.nunique()
            if seeds == (most if part.seed.iloc[0] >= 0 else 1):
                one.correct[cell] = part.correct.to_numpy(float).reshape(seeds, -1)
                one.forwards[cell] = part.forwards.to_numpy(float).reshape(seeds, -1)
                one.shares[cell] = float(part.policy_seconds.sum() / part.seconds.sum())
        found[key] = one
    return found


OURS = {"outcome": "outcome TraceLock", "every": "one policy for every window"}
"""Policies trained on outcomes, which compete with all others, by what tables call them."""
CONTESTS = {
    "whole responses": ("whole",),
    "blocks": tuple(f"blocks-{size}" for size in BLOCKS),
    "blocks with a cache": ("cache",),
}
"""Contests of outcome TraceLock with all others: by name, the windows of both sides."""


NEAR = 0.01
"""How much less accurate than our best cell a faster one may be in the second contest."""


def contest(
    validation: Decodes,
    test: Decodes,
    windows: Sequence[str],
    within: float = 0.0,
    policy: str = "outcome",
) -> dict[str, Any] | None:
    """Compares a policy, of ``OURS`` or another, with the best of all others at as many forwards.

    Settings of both sides are chosen on the validation list, ours by :func:`choice`. Theirs are the
    two cells whose mixture (each problem is decoded by one or the other, at random) is the most
    accurate at our forwards; the mixture's shares are those that give our forwards on the test
    list.
    """
    cells = [cell for cell in test.correct if cell[1] in windows]
    ours = [cell for cell in cells if cell[0] == policy]
    others = [cell for cell in cells if cell[0] not in {policy, *OURS}]
    if not ours or not others:
        return None
    own = choice(validation, ours, within)
    at = test.point(own)[0]
    fast, slow, share = mixture(validation, test, others, at)
    mixed = (1 - share) * test.correct[fast] + share * test.correct[slow]
    difference = test.correct[own] - mixed
    error, freedom = standard_error(difference), degrees_of_freedom(difference)
    return {
        "ours": (own, *test.point(own), standard_error(test.correct[own])),
        "theirs": (fast, slow, share, float(mixed.mean())),
        "difference": (float(difference.mean()), error, freedom),
    }


def choice(validation: Decodes, cells: Sequence[Cell], within: float) -> Cell:
    """Returns the fastest cell that is at most ``within`` less accurate than the best one."""
    best = max(validation.point(cell)[1] for cell in cells)
    near = [cell for cell in cells if validation.point(cell)[1] >= best - within]
    return min(near, key=lambda cell: (validation.point(cell)[0], -validation.point(cell)[1]))


def mixture(
    validation: Decodes, test: Decodes, cells: Sequence[Cell], forwards: float
) -> tuple[Cell, Cell, float]:
    """Returns the best two cells around a number of forwards, and the share of the slower one."""
    best: tuple[float, Cell, Cell, float] | None = None
    for fast, slow in itertools.product(cells, cells):
        low, high = test.point(fast)[0], test.point(slow)[0]
        if low > forwards or (high < forwards and fast != slow):
            continue
        share = 0.0 if fast == slow else (forwards - low) / max(high - low, 1e-9)
        rates = validation.point(fast)[1], validation.point(slow)[1]
        rate = (1 - share) * rates[0] + share * rates[1]
        if best is None or rate > best[0]:
            best = rate, fast, slow, share
    if best is None:  # all others are slower: their fastest
        fast = min(cells, key=lambda cell: test.point(cell)[0])
        return fast, fast, 0.0
    return best[1:]


def oracle(test: Decodes) -> tuple[NDArray[Any], NDArray[Any]]:
    """Returns mean forwards and accuracies if each problem had the decode that solves it fastest.

    Problems are added in order of the forwards of their fastest right decode; the others cost what
    their fastest decode does.
    """
    right = [np.where(test.correct[c] > 0, test.forwards[c], np.inf).min(0) for c in test.correct]
    any_ = np.min([test.forwards[c].min(0) for c in test.correct], axis=0)
    fastest = np.min(right, axis=0)
    order = np.argsort(fastest)
    solved = np.isfinite(fastest[order])
    saved = np.where(solved, fastest[order] - any_[order], 0.0)
    forwards = any_.sum() + np.cumsum(saved)
    return forwards / len(order), np.cumsum(solved) / len(order)


def contests(
    results: dict[tuple[str, str], Decodes], within: float = 0.0, policy: str = "outcome"
) -> list[tuple[str, str, dict[str, Any], float]]:
    """Returns task, kind of windows, outcome and p-value (Holm's) of every :func:`contest`."""
    found = []
    for task, (name, windows) in itertools.product(TASKS, CONTESTS.items()):
        if (task, "test") in results:
            lists = results[task, "validation"], results[task, "test"]
            if one := contest(*lists, windows, within, policy):
                found.append((task, name, one))
    adjusted = p_values([one["difference"] for *_, one in found])
    return [(*one, p) for one, p in zip(found, adjusted, strict=True)]


def p_values(differences: Iterable[tuple[float, float, float]]) -> list[float]:
    """Returns Holm's p-values of differences: mean, standard error and degrees of freedom each."""
    return holm(
        [
            float(np.interp(abs(mean) / max(error, 1e-12), *student(freedom)))
            for mean, error, freedom in differences
        ]
    )


def contests_table(
    results: dict[tuple[str, str], Decodes], within: float = 0.0, policy: str = "outcome"
) -> str:
    """The contests as Markdown, accuracies in per cent."""
    head = ["task", "where", OURS[policy]]
    lines = [[*head, "best of the others there", "difference [95 %]", "p"]]
    for task, name, found, p in contests(results, within, policy):
        _, forwards, accuracy, error = found["ours"]
        fast, slow, share, rate = found["theirs"]
        by = shown(slow) if share > 0.995 or fast == slow else f"{shown(fast)}, {shown(slow)}"
        lines.append(
            [
                task,
                name,
                f"{100 * accuracy:.1f} ± {100 * error:.1f} @ {forwards:.1f}",
                f"{100 * rate:.1f} ({by})",
                interval(*found["difference"]),
                f"{p:.2g}" if p > 1e-10 else "< 1e-10",
            ]
        )
    return table(lines)


def summary_table(
    results: dict[tuple[str, str], Decodes], within: float = 0.0, policy: str = "outcome"
) -> str:
    """Returns a row per task: right @ forwards, and the difference, bold where p is below 0.05."""
    lines: dict[str, list[str]] = {}
    for task, _, found, p in contests(results, within, policy):
        _, forwards, accuracy, _ = found["ours"]
        mark, difference = "**" if p < 0.05 else "", interval(*found["difference"])
        cell = f"{100 * accuracy:.1f} @ {forwards:.1f}, {mark}{difference}{mark}"
        lines.setdefault(task, [task]).append(cell)
    return table([["", *CONTESTS], *lines.values()])


def margin(error: float, freedom: float) -> float:
    """Returns how far a 95 % interval, of Student's t, reaches to either side."""
    values, tails = student(freedom)
    return error * float(np.interp(-0.05, -tails, values))


def interval(mean: float, error: float, freedom: float) -> str:
    """Formats a difference in points with its 95 % interval."""
    width = margin(error, freedom)
    low, high = mean - width, mean + width
    return f"{100 * mean:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


def gain(values: NDArray[Any]) -> str:
    """Formats differences of verdicts, of shape (seeds, problems), as :func:`interval` does."""
    return interval(float(values.mean()), standard_error(values), degrees_of_freedom(values))


def fronts_table(results: dict[tuple[str, str], Decodes]) -> str:
    """Returns the test results of each policy's most accurate cell in validation."""
    tasks = [task for task in TASKS if (task, "test") in results]
    policies = sorted({cell[0] for task in tasks for cell in results[task, "test"].correct})
    lines: list[Sequence[str]] = [["where", "policy", *tasks]]
    for (where, windows), policy in itertools.product(CONTESTS.items(), policies):
        line = [where, policy]
        for task in tasks:
            validation, test = results[task, "validation"], results[task, "test"]
            own = [cell for cell in test.correct if cell[0] == policy and cell[1] in windows]
            best = max(own, key=lambda cell: validation.point(cell)[1], default=None)
            if best is None:
                line.append("")
            else:
                forwards, rate = test.point(best)
                line.append(f"{100 * rate:.1f} @ {forwards:.1f}")
        lines.append(line)
    return table(lines)


def curve_table(curves: dict[str, Any]) -> str:
    """Accuracy on the validation list by the number of rollouts, means over seeds."""
    shown = (0, 3200, 6400, 12800, 19200, 25600, 32000)
    lines: list[Sequence[str]] = [["task", "trained", *(f"{n:,}" for n in shown)]]
    for task, kinds in curves.items():
        for kind, seeds in kinds.items():
            by_step = {n: np.mean([a[1:] for s in seeds for a in s if a[0] == n], 0) for n in shown}
            cells = [f"{100 * rate:.1f} @ {steps:.1f}" for rate, steps in by_step.values()]
            lines.append([task, kind, *cells])
    return table(lines)


def listing(path: Path) -> str:
    """Returns all cells of the validation lists as Markdown: right ± error @ forwards."""
    results = read(path)
    tasks = [task for task in TASKS if (task, "validation") in results]
    named = {cell: None for task in tasks for cell in results[task, "validation"].correct}
    lines: list[Sequence[str]] = [["policy", "setting", "window", *tasks]]
    for cell in sorted(named, key=lambda cell: (cell[1], cell[0], cell[2])):
        entries = []
        for task in tasks:
            found = results[task, "validation"]
            if cell not in found.correct:
                entries.append("")
                continue
            right = found.correct[cell]
            forwards, rate = found.point(cell)
            error = (rate * (1.0 - rate) / right.size) ** 0.5
            entries.append(f"{100 * rate:.1f} ± {100 * error:.1f} @ {forwards:.1f}")
        lines.append([cell[0], cell[2], cell[1], *entries])
    return table(lines)


def shown(cell: Cell) -> str:
    """Returns the name of a cell in tables."""
    policy, window, setting = cell
    return f"{policy} {setting}" if window == "whole" else f"{policy} {setting}, {window}"


SERIES = {"threshold": 5, "left-to-right": 2, "entropy-bounded": 0, "tracelock": 3, "outcome": 1}
"""Indices into a theme's colours by policy, the last one on top; all other fronts are grey."""
FIVE = {
    "outcome": "TraceLock from outcomes",
    "tracelock": "TraceLock from traces",
    "entropy-bounded": "entropy-bounded",  # the most accurate rule below 32 forwards
    "threshold": "threshold",
    "left-to-right": "left to right",
}
"""Policies in README's figure, and how it calls them."""


def fastest(test: Decodes, policy: str, windows: Sequence[str]) -> list[Cell]:
    """Returns a policy's cells in some windows that are more accurate than all its faster ones."""
    cells = [cell for cell in test.correct if cell[0] == policy and cell[1] in windows]
    front: list[Cell] = []
    for cell in sorted(cells, key=test.point):
        if not front or test.point(cell)[1] > test.point(front[-1])[1]:
            front.append(cell)
    return front


def mark_forwards(axis: Axes) -> None:
    """Gives an axis a logarithmic scale of forwards."""
    axis.set_xscale("log")
    axis.set_xticks(ticks := (1, 2, 4, 8, 16, 32), [f"{tick}" for tick in ticks], minor=False)
    axis.set_xticks([], minor=True)


def draw(results: dict[tuple[str, str], Decodes], path: Path) -> None:
    """Draws fronts on the test lists: a row for each task, a column for each kind of windows."""
    names = [task for task in TASKS if (task, "test") in results]

    def figure(theme: Theme) -> Figure:
        drawn = Figure(figsize=(9.6, 1.5 * len(names) + 1.2), layout="constrained")
        axes = drawn.subplots(len(names), len(CONTESTS), squeeze=False)
        for (row, task), (column, (kind, windows)) in itertools.product(
            enumerate(names), enumerate(CONTESTS.items())
        ):
            axis, test = axes[row][column], results[task, "test"]
            best = 100 * max(rates.mean() for rates in test.correct.values())
            others = {cell[0] for cell in test.correct} - SERIES.keys()
            for policy in (*sorted(others), *SERIES):
                front = [test.point(cell) for cell in fastest(test, policy, windows)]
                if front:
                    is_named = policy in SERIES
                    x, y = zip(*front, strict=True)
                    axis.plot(
                        x,
                        [100 * value for value in y],
                        color=theme.series[SERIES[policy]] if is_named else theme.muted,
                        alpha=1.0 if is_named else 0.5,
                        label=policy if is_named else "all others",
                        marker="o",
                        markersize=3,
                    )
            steps, rates = oracle(test)
            axis.plot(
                steps, 100 * rates, ":", color=theme.text, label="the fastest for each problem"
            )
            axis.set_ylim(best - 40, 101)
            mark_forwards(axis)
            axis.set_xlim(0.8 * steps[0], None)
            if row == 0:
                axis.set_title(kind)
            if column == 0:
                axis.set_ylabel(f"{task}, %")
            tidy_axes(axis)
        for axis in axes[-1]:
            axis.set_xlabel("forwards")
        common_legend(drawn, 4)
        return drawn

    save_themes(path, figure)


def with_intervals(axis: Axes, test: Decodes, cells: Sequence[Cell], **style: Any) -> None:
    """Draws a line through some cells, with 95 % intervals."""
    rights = [test.correct[cell] for cell in cells]
    axis.errorbar(
        [test.forwards[cell].mean() for cell in cells],
        [100 * right.mean() for right in rights],
        [100 * margin(standard_error(one), degrees_of_freedom(one)) for one in rights],
        markersize=4,
        elinewidth=0.8,
        **style,
    )


def draw_five(test: Decodes, path: Path) -> None:
    """Draws ``FIVE`` on a test list without a cache, in their best windows, with 95 % intervals."""

    def figure(theme: Theme) -> Figure:
        drawn = Figure(figsize=(7.0, 3.6), layout="constrained")
        axis = drawn.subplots()
        for marker, (policy, label) in zip("osD^v", FIVE.items(), strict=True):
            cells = fastest(test, policy, ("whole", *CONTESTS["blocks"]))
            with_intervals(
                axis, test, cells, label=label, color=theme.series[SERIES[policy]], marker=marker
            )
        axis.set(xlabel="forwards of the model for a problem", ylabel="right, %")
        mark_forwards(axis)
        axis.set_xlim(4, 36)
        tidy_axes(axis)
        common_legend(drawn, 3)
        return drawn

    save_themes(path, figure)


def report(path: Path) -> None:
    """Prints the tables and draws the figures of a results file."""
    try:
        results = read(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise SystemExit(
            f"--results: {path}: expected results of this bench, got {type(error).__name__}"
        ) from None
    draw(results, path.with_suffix(".png"))
    if ("words", "test") in results:
        draw_five(results["words", "test"], path.with_name(f"{path.stem}_words.png"))
    for within in (0.0, NEAR):
        print(summary_table(results, within))
        print(contests_table(results, within))
    print(fronts_table(results))
    if (curves := path.with_suffix(".json")).exists():
        print(curve_table(json.loads(curves.read_text())))


if __name__ == "__main__":
    main()
