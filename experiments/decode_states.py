"""Does training on the states of the decode itself do more than training on random states?

Every setting trains the same adapter twice for each seed: on states that the recorded decode went
through, and on states with random cells hidden, from the same problems, with as many rows, updates
and targets' tokens to read. Then both decode a list of fresh problems at the same numbers of
forwards. ``docs/decode_states.md`` has the plan, which was written before the first run, and the
results. All of it runs through the command line; parts that are on disk are not made again.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from chain import EXP, call, difference, gained, problems, seed_flags, table
from matplotlib.figure import Figure

from lit_dlm.ops.files import write_atomically
from lit_dlm.reports.plots import Theme, method_styles, save_themes, tidy_axes
from lit_dlm.reports.results import ResultFolder, ResultRow

ORDER = ("entropy_1", "entropy_2", "entropy_4")
FAST = ("threshold_06", "threshold_09", "threshold_dual_06", "threshold_dual_09")


@dataclass(frozen=True)
class Setting:
    """What is trained and how it is judged."""

    model: str
    """Name of the option that has the folder to start from; else an embedded model."""
    task: str
    length: int
    """Response cells."""
    judged: tuple[str, ...]
    """Methods of ``stack_tiny.yaml`` whose mean accuracy decides."""
    updates: int
    """Optimiser updates of fine-tuning; RL steps of reinforcement learning."""
    decoder: dict[str, Any] | None = None
    """Plugs that rollouts and validation get; ``None`` fine-tunes on recorded decodes."""

    @property
    def methods(self) -> tuple[str, ...]:
        """All methods that decode the list."""
        return tuple(dict.fromkeys((*self.judged, *FAST)))


BLOCKS = {
    "window": {"class_path": "BlockWindow", "init_args": {"block_length": 8}},
    "cache": {"class_path": "DualCache"},
}
SETTINGS = {
    "words": Setting("weak", "WordProblems", 32, ORDER, 200),
    "words-few-updates": Setting("weak", "WordProblems", 32, ORDER, 50),
    "sudoku": Setting("tiny-planning", "Sudoku", 20, ORDER, 200),
    "addition": Setting("addition", "Addition", 10, ORDER, 200),
    "countdown": Setting("countdown", "Countdown", 56, ORDER, 200),
    "rl": Setting("tiny", "WordProblems", 32, ("threshold_06",), 4, {}),
    "rl-blocks-cache": Setting("tiny", "WordProblems", 32, ("threshold_dual_06",), 4, BLOCKS),
}


def main() -> None:
    """Makes what is missing, then reports on what is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("weak", "addition", "countdown"):
        parser.add_argument(f"--{name}", help=f"folder of the {name} model, see the page")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--distil", type=int, default=3000, help="training problems to decode")
    parser.add_argument("--size", type=int, default=1000, help="problems of the test list")
    parser.add_argument("--list-seed", type=int, default=11, help="of the test list")
    parser.add_argument("--only-report", action="store_true", help="run nothing")
    options = parser.parse_args()
    for model in {SETTINGS[name].model for name in options.settings} & vars(options).keys():
        if not options.only_report and getattr(options, model) is None:
            parser.error(f"--{model}: needed for these settings, see the page")
    torch.set_num_threads(1)
    report = {}
    for name in options.settings:
        setting = SETTINGS[name]
        folder = options.out / name
        path = getattr(options, setting.model, None) or setting.model
        arms: dict[str, list[Path]] = {"random": [], "decode": []}
        for seed in options.seeds:
            for arm, results in arms.items():
                if not options.only_report:
                    adapter = trained(options, name, path, arm, seed)
                    measure(options, setting, path, adapter, folder / f"{arm}-s{seed}")
                results.append(folder / f"{arm}-s{seed}" / "stack" / "results")
        for made in (*arms["random"], *arms["decode"]):
            if not made.exists():
                parser.error(f"there is no {made}: run without --only-report")
        report[name] = compare(setting, arms["decode"], arms["random"])
        write_atomically(options.out / "decode_states.json", json.dumps(report, indent=2) + "\n")
        write_atomically(options.out / "decode_states.md", markdown(report))
    draw(report, options.out / "decode_states.png")
    print(markdown(report))


def trained(options: argparse.Namespace, name: str, path: str, arm: str, seed: int) -> Path:
    """Trains one adapter of a setting and returns its folder.

    Args:
        options: of the command line.
        name: of the setting.
        path: of the model.
        arm: ``decode`` or ``random``.
        seed: of training.
    """
    setting = SETTINGS[name]
    folder = options.out / name / "fit" / f"{arm}-s{seed}"
    model = ["--model.backbone.init_args.path", path]
    if setting.decoder is not None:
        config = "tracerl_tiny.yaml" if arm == "decode" else "tracerl_tiny_random.yaml"
        call(
            folder / "done",
            *("fit", "--config", EXP / config, *model, *seed_flags(seed), "--run_dir", folder),
            *("--trainer.max_epochs", setting.updates),
            *("--trainer.check_val_every_n_epoch", setting.updates),
            *("--model.decoders", json.dumps(rollout_decoders(setting.decoder))),
        )
        return folder / "policy" / "last"
    model += ["--model.tokenizer", tokenizer_of(setting.task)]
    task = problems(setting.task, "train", options.distil, **task_options(setting.task))
    distilled = options.out / "distilled" / f"{Path(path).name}-{setting.task}"
    call(
        distilled / "done",
        *("predict", "--config", EXP / "distill_tiny.yaml", *model, "--run_dir", distilled),
        *("--data.tasks", task, "--data.response_length", setting.length),
    )
    states = {"class_path": "RandomMasking", "init_args": {"weight": "none"}}
    if arm == "decode":
        states = {"class_path": "TimeDelay", "init_args": {"window": setting.length // 2}}
    source = {"shards": str(distilled / "traces"), "only_correct": True, "tasks": None}
    call(
        folder / "done",
        *(
            "fit",
            "--config",
            EXP / "sft_sd_tiny.yaml",
            *model,
            *seed_flags(seed),
            "--run_dir",
            distilled,
        ),
        *("--trainer.default_root_dir", folder, "--trainer.callbacks", "[]"),
        *("--trainer.enable_checkpointing", "false", "--trainer.logger", "false"),
        *("--trainer.max_steps", setting.updates, "--model.corruption", json.dumps(states)),
        *("--model.export_dir", folder / "adapter", "--data.response_length", setting.length),
        *("--data.sources", json.dumps([{"class_path": "RecordedDecodes", "init_args": source}])),
    )
    return folder / "adapter"


def rollout_decoders(plugs: dict[str, Any]) -> dict[str, Any]:
    """The decoders of ``tracerl_tiny.yaml`` with other plugs; that of evaluation has no chance."""
    common = {
        "policy": {"class_path": "ThresholdPolicy", "init_args": {"threshold": 0.6}},
        "quota": "NoQuota",
        "settings": {"eos_rule": "fill"},
        **plugs,
    }
    return {
        "rollout": {**common, "sampler": {"temperature": 1.0, "score_on": "raw"}},
        "evaluation": common,
    }


def tokenizer_of(task: str) -> str:
    """Name of the tokenizer that a task's models have."""
    return "tiny-planning" if task in ("Sudoku", "Countdown") else "tiny"


def task_options(task: str) -> dict[str, Any]:
    """Options of a task's list: Countdown's problems have three numbers."""
    return {"counts": [3]} if task == "Countdown" else {}


def measure(
    options: argparse.Namespace, setting: Setting, path: str, adapter: Path, folder: Path
) -> None:
    """Decodes the test list with a trained adapter."""
    task = problems(
        *(setting.task, "test", options.size),
        seed=options.list_seed,
        **task_options(setting.task),
    )
    call(
        folder / "done",
        *("predict", "--config", EXP / "stack_tiny.yaml", "--run_dir", folder),
        *("--model.backbone.init_args.path", path),
        *("--model.backbone.init_args.adapter", adapter),
        *("--model.tokenizer", tokenizer_of(setting.task)),
        *("--data.tasks", task, "--data.response_length", setting.length),
        *("--data.methods", f"[{', '.join(setting.methods)}]"),
    )


def compare(setting: Setting, decode: Sequence[Path], random: Sequence[Path]) -> dict[str, Any]:
    """Accuracies of both arms, and their differences.

    Args:
        setting: the setting.
        decode: result folders of training on the decode's states, one a seed.
        random: of training on random states.

    Returns:
        By method: mean accuracies, forwards and the paired difference with its errors;
        ``equal_forwards`` is the difference to the line between the random arm's two thresholds, at
        the forwards of the other arm, where it reaches them. ``judged`` is the difference of the
        mean over the methods that decide.
    """
    rows = {
        arm: {method: [_rows(folder, method) for folder in folders] for method in setting.methods}
        for arm, folders in (("decode", decode), ("random", random))
    }
    found: dict[str, Any] = {}
    for method in setting.methods:
        right = {arm: [_verdicts(seed) for seed in rows[arm][method]] for arm in rows}
        found[method] = {
            "accuracy": {
                arm: [statistics.mean(seed.values()) for seed in seeds]
                for arm, seeds in right.items()
            },
            "forwards": {
                arm: statistics.mean(_forwards(seed) for seed in rows[arm][method]) for arm in rows
            },
            "difference": difference(right["decode"], right["random"]),
        }
        if method in FAST:
            stem = method.rpartition("_")[0]
            ends = [rows["random"][f"{stem}_{level}"] for level in ("06", "09")]
            low, high = (statistics.mean(map(_forwards, end)) for end in ends)
            if low <= found[method]["forwards"]["decode"] <= high:
                line = map(_between, *ends, map(_forwards, rows["decode"][method]))
                found[method]["equal_forwards"] = difference(right["decode"], list(line))
    means = {
        arm: [
            {uid: statistics.mean(row[uid].correct for row in tables) for uid in tables[0]}
            for tables in zip(*(rows[arm][method] for method in setting.judged), strict=True)
        ]
        for arm in rows
    }
    found["judged"] = difference(means["decode"], means["random"])
    return found


def _rows(folder: Path, method: str) -> dict[str, ResultRow]:
    results = ResultFolder(folder)
    ((task, _),) = [pair for pair in results.pairs() if pair[1] == method]
    return {row.uid: row for row in results.rows(task, method)}


def _verdicts(rows: dict[str, ResultRow]) -> dict[str, float]:
    return {uid: float(row.correct) for uid, row in rows.items()}


def _forwards(rows: dict[str, ResultRow]) -> float:
    return statistics.mean(row.nfe for row in rows.values())


def _between(
    fast: dict[str, ResultRow], slow: dict[str, ResultRow], forwards: float
) -> dict[str, float]:
    """Verdicts on the line through two methods, at a number of forwards."""
    share = (forwards - _forwards(fast)) / (_forwards(slow) - _forwards(fast))
    return {uid: (1 - share) * row.correct + share * slow[uid].correct for uid, row in fast.items()}


def markdown(report: dict[str, Any]) -> str:
    """The report as two tables in per cent and points: with fixed steps, and with thresholds.

    A cell has the accuracy of training on the decode's states, with its forwards where they are not
    fixed, and the difference to random states; in brackets that at equal forwards, where it is
    known.
    """
    fixed = list(dict.fromkeys(m for found in report.values() for m in found if "entropy" in m))
    tables = [[["setting", *fixed, "judged"]], [["setting", *FAST]]]
    for name, found in report.items():
        for lines, methods in zip(tables, (fixed, FAST), strict=True):
            cells = [_shown(method, found[method]) if method in found else "" for method in methods]
            if any(cells):
                lines.append([name, *cells])
        if tables[0][-1][0] == name:
            tables[0][-1].append(f"**{gained(found['judged'])}**")
    return "\n".join(map(table, tables))


def _shown(method: str, found: dict[str, Any]) -> str:
    shown = f"{100 * statistics.mean(found['accuracy']['decode']):.1f}"
    at = f" @ {found['forwards']['decode']:.1f}" if method in FAST else ""
    equal = f" ({gained(found['equal_forwards'])})" if "equal_forwards" in found else ""
    return f"{shown}{at}, {gained(found['difference'])}{equal}"


def draw(report: dict[str, Any], path: Path) -> None:
    """Differences of all settings, with two standard errors."""

    def figure(theme: Theme) -> Figure:
        drawn = Figure(figsize=(6.4, 2.8), layout="constrained")
        axis = drawn.subplots()
        for height, (name, found) in enumerate(report.items()):
            shown = [found["judged"]]
            if SETTINGS[name].decoder is not None:
                (method,) = SETTINGS[name].judged
                shown.append(found[method]["equal_forwards"])
            for number, values in enumerate(shown):
                axis.errorbar(
                    100 * values["mean"],
                    height + 0.25 * number,
                    xerr=200 * max(values["stderr_problems"], values["stderr_seeds"]),
                    capsize=3,
                    **method_styles(["tracerl", "tracerl at equal forwards"], theme)[number],
                )
        axis.axvline(0, color=theme.muted, linewidth=1)
        axis.set_yticks(range(len(report)), list(report))
        axis.invert_yaxis()
        axis.set_xlabel("gain in points over random states (hollow: at equal forwards)")
        tidy_axes(axis)
        return drawn

    save_themes(path, figure)


if __name__ == "__main__":
    main()
