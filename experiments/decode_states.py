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
from tabom_effect import EXP, call, difference, problems

from lit_dlm.reports.results import ResultFolder, write_atomically

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
        report[name] = compare(setting, arms["decode"], arms["random"])
        write_atomically(options.out / "decode_states.json", json.dumps(report, indent=2) + "\n")
        write_atomically(options.out / "decode_states.md", markdown(report))
    print(markdown(report))


def trained(options: argparse.Namespace, name: str, path: str, arm: str, seed: int) -> Path:
    """Trains one adapter.

    Args:
        options: of the command line.
        name: of the setting.
        path: of the model.
        arm: ``decode`` or ``random``.
        seed: of training.

    Returns:
        The adapter's folder.
    """
    setting = SETTINGS[name]
    folder = options.out / name / "fit" / f"{arm}-s{seed}"
    model = ["--model.backbone.init_args.path", path]
    seeds = ["--seed_everything", seed, "--model.seed", seed, "--data.seed", seed]
    if setting.decoder is not None:
        config = "tracerl_tiny.yaml" if arm == "decode" else "tracerl_tiny_random.yaml"
        call(
            folder / "done",
            *("fit", "--config", EXP / config, *model, *seeds, "--run_dir", folder),
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
        *("fit", "--config", EXP / "sft_sd_tiny.yaml", *model, *seeds, "--run_dir", distilled),
        *("--trainer.default_root_dir", folder, "--trainer.callbacks", "[]"),
        *("--trainer.enable_checkpointing", "false", "--trainer.logger", "false"),
        *("--trainer.max_steps", setting.updates, "--model.corruption", json.dumps(states)),
        *("--model.export_dir", folder / "adapter", "--data.response_length", setting.length),
        *("--data.sources", json.dumps([{"class_path": "RecordedDecodes", "init_args": source}])),
    )
    return folder / "adapter"


def rollout_decoders(plugs: dict[str, Any]) -> dict[str, Any]:
    """The decoders of ``tracerl_tiny.yaml`` with other plugs.

    Args:
        plugs: window and cache, or nothing.

    Returns:
        ``rollout`` and ``evaluation``, which has no chance.
    """
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
    """Decodes the test list.

    Args:
        options: of the command line.
        setting: the setting.
        path: of the model.
        adapter: what was trained.
        folder: of the results.
    """
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
        By method: mean accuracies, forwards and the paired difference with its errors; ``judged``
        is that of the mean over the methods that decide.
    """
    found: dict[str, Any] = {}
    together: dict[str, list[list[dict[str, bool]]]] = {"decode": [], "random": []}
    for method in setting.methods:
        verdicts: dict[str, list[dict[str, bool]]] = {}
        forwards = {}
        for arm, folders in (("decode", decode), ("random", random)):
            rows = []
            for folder in folders:
                results = ResultFolder(folder)
                ((task, _),) = [pair for pair in results.pairs() if pair[1] == method]
                rows.append(results.rows(task, method))
            verdicts[arm] = [{row.uid: row.correct for row in seed} for seed in rows]
            forwards[arm] = statistics.mean(row.nfe for seed in rows for row in seed)
        found[method] = {
            "accuracy": {
                arm: [statistics.mean(table.values()) for table in tables]
                for arm, tables in verdicts.items()
            },
            "forwards": forwards,
            "difference": difference(verdicts["decode"], verdicts["random"]),
        }
        if method in setting.judged:
            for arm, tables in verdicts.items():
                together[arm].append(tables)
    means = {
        arm: [
            {uid: statistics.mean(table[uid] for table in tables) for uid in tables[0]}
            for tables in zip(*lists, strict=True)
        ]
        for arm, lists in together.items()
    }
    found["judged"] = difference(means["decode"], means["random"])
    return found


def markdown(report: dict[str, Any]) -> str:
    """The report as a table, in percent and points.

    Args:
        report: by setting, from :func:`compare`.

    Returns:
        Markdown; errors are the larger one of those over problems and over seeds.
    """
    lines = "| setting | method | forwards | random states | the decode's states | difference |\n"
    lines += "|---|---|---|---|---|---|\n"
    for name, found in report.items():
        for method, values in found.items():
            if method == "judged":
                lines += f"| **{name}** | judged | | | | **{_points(values)}** |\n"
                continue
            rates = {arm: 100 * statistics.mean(each) for arm, each in values["accuracy"].items()}
            steps = "/".join(f"{values['forwards'][arm]:.1f}" for arm in ("random", "decode"))
            lines += (
                f"| {name} | {method} | {steps} | {rates['random']:.1f} | {rates['decode']:.1f} | "
                f"{_points(values['difference'])} |\n"
            )
    return lines


def _points(found: dict[str, float]) -> str:
    error = max(found["stderr_problems"], found["stderr_seeds"])
    return f"{100 * found['mean']:+.1f} ± {100 * error:.1f}"


if __name__ == "__main__":
    main()
