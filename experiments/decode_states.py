"""Does training on the states of the decode itself do more than training on random states?

Every setting trains the same adapter twice for each seed: on states that the recorded decode went
through, and on states with random cells hidden, from the same problems, with as many rows, updates
and targets' tokens to read. Then both decode a list of fresh problems at the same numbers of
forwards. Its page in ``docs/results`` has the plan, which was written before the first run, and the
results.

    lit-dlm fit --config exp/pretrain_tiny --run_dir runs/weak --trainer.max_steps 1400
    lit-dlm fit --config exp/pretrain_addition
    lit-dlm fit --config exp/pretrain_planning --config domain/countdown
    python experiments/decode_states.py --weak runs/weak/model --addition runs/addition/model \
        --countdown runs/countdown/model --out runs/decode_states  # makes what is missing
    python experiments/decode_states.py  # tables and picture of the published results

Several processes may make different ``--settings`` of one folder, but ``words`` and
``words-few-updates``, which train on the same decodes; the last one then collects all.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import dataclass
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
    recorded,
    seed_flags,
    standard_error,
    table,
)
from matplotlib.figure import Figure
from numpy.typing import NDArray

from lit_dlm.reports.plots import Theme, method_styles, save_themes, tidy_axes

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
    """Methods of ``eval/stack`` whose mean accuracy decides."""
    updates: int
    """Optimiser updates of fine-tuning; RL steps of reinforcement learning."""
    decoder: dict[str, Any] | None = None
    """Components that rollouts and validation get; ``None`` fine-tunes on recorded decodes."""

    @property
    def methods(self) -> tuple[str, ...]:
        """All methods that decode the list."""
        return tuple(dict.fromkeys((*self.judged, *FAST)))


BLOCKS = {
    "window": {"class_path": "BlockWindow", "init_args": {"block_length": 8}},
    "cache": {"class_path": "DualCache"},
}
DISTILLED = 3000
"""Training problems that are decoded for fine-tuning."""

SETTINGS = {
    "words": Setting("weak", "WordProblems", 32, ORDER, 200),
    "words-few-updates": Setting("weak", "WordProblems", 32, ORDER, 50),
    "sudoku": Setting("tiny-planning", "Sudoku", 20, ORDER, 200),
    "addition": Setting("addition", "Addition", 10, ORDER, 200),
    "countdown": Setting("countdown", "Countdown", 56, ORDER, 200),
    "rl": Setting("tiny", "WordProblems", 32, ("threshold_06",), 4, {}),
    "rl-blocks-cache": Setting("tiny", "WordProblems", 32, ("threshold_dual_06",), 4, BLOCKS),
}

ARMS = ("random", "decode")
"""States that are trained on."""


def main() -> None:
    """Makes what is missing, then tables and picture."""
    words = parser(__doc__, 0, 1, 2)
    for name in ("weak", "addition", "countdown"):
        words.add_argument(f"--{name}", help=f"folder of the {name} model, see the page")
    words.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    options = words.parse_args()
    kept = (options.out or Path("docs/results/decode_states")) / "decode_states.parquet"
    if options.out:
        for model in {SETTINGS[name].model for name in options.settings} & vars(options).keys():
            if getattr(options, model) is None:
                words.error(f"--{model}: needed for these settings, see the page")
        runs = [
            (f"{name}, {arm}", seed, measure(options, name, arm, seed))
            for name, seed, arm in itertools.product(options.settings, options.train_seeds, ARMS)
        ]
        keep_decodes(kept, runs)
    decodes = read_decodes(kept)
    draw(decodes, kept.with_suffix(".png"))
    print(markdown(decodes))


def trained(options: argparse.Namespace, name: str, path: str, arm: str, seed: int) -> Path:
    """Trains one adapter of a setting; returns its folder."""
    setting = SETTINGS[name]
    folder = options.out / name / "fit" / f"{arm}-s{seed}"
    model = ["--model.backbone.init_args.path", path]
    if setting.decoder is not None:
        overlay = [] if arm == "decode" else ["--config", "method/random_tiny"]
        call(
            folder / "done",
            *("fit", "--config", "exp/tracerl_tiny", *overlay, *model, *seed_flags(seed)),
            *("--run_dir", folder),
            *("--ckpt_path", "last", "--trainer.max_epochs", setting.updates),
            *("--trainer.check_val_every_n_epoch", setting.updates),
            *("--model.decoders", json.dumps(rollout_decoders(setting.decoder))),
        )
        return folder / "policy" / "last"
    model += ["--model.tokenizer", tokenizer_of(setting.task)]
    task = problems(setting.task, "train", DISTILLED, **task_options(setting.task))
    distilled = options.out / "distilled" / f"{Path(path).name}-{setting.task}"
    call(
        distilled / "done",
        *("predict", "--config", "exp/distill_tiny", *model, "--run_dir", distilled),
        *("--data.tasks", task, "--data.response_length", setting.length),
    )
    states = {"class_path": "RandomMasking", "init_args": {"weight": "none"}}
    if arm == "decode":
        states = {"class_path": "TimeDelay", "init_args": {"window": setting.length // 2}}
    call(
        folder / "done",
        *("fit", "--config", "exp/sft_gt_tiny", "--config", "data/own_answers_tiny"),
        *(*model, *seed_flags(seed)),
        *("--run_dir", distilled, "--trainer.default_root_dir", folder, *BARE),
        *("--trainer.max_steps", setting.updates, "--model.masking", json.dumps(states)),
        *("--model.export_dir", folder / "adapter", "--data.response_length", setting.length),
        *("--data.sources", recorded(distilled)),
    )
    return folder / "adapter"


def rollout_decoders(components: dict[str, Any]) -> dict[str, Any]:
    """Returns the decoders of ``tracerl_tiny.yaml`` with other parts; evaluation has no chance."""
    common = {
        "policy": {"class_path": "ThresholdPolicy", "init_args": {"threshold": 0.6}},
        "quota": "NoQuota",
        "settings": {"eos_rule": "fill"},
        **components,
    }
    return {
        "rollout": {**common, "sampler": {"temperature": 1.0, "score_on": "raw"}},
        "evaluation": common,
    }


def tokenizer_of(task: str) -> str:
    """Returns the name of the tokenizer that a task's models have."""
    return "tiny-planning" if task in ("Sudoku", "Countdown") else "tiny"


def task_options(task: str) -> dict[str, Any]:
    """Returns options of a task's list: Countdown's problems have three numbers."""
    return {"counts": [3]} if task == "Countdown" else {}


def measure(options: argparse.Namespace, name: str, arm: str, seed: int) -> Path:
    """Trains an adapter and decodes the test list with it; returns the folder of results."""
    setting, folder = SETTINGS[name], options.out / name / f"{arm}-s{seed}"
    path = getattr(options, setting.model, None) or setting.model
    adapter = trained(options, name, path, arm, seed)
    task = problems(setting.task, "test", 1000, seed=11, **task_options(setting.task))
    call(
        folder / "done",
        *("predict", "--config", "exp/evaluate_tiny", "--config", "eval/stack"),
        *("--run_dir", folder),
        *("--model.backbone.init_args.path", path),
        *("--model.backbone.init_args.adapter", adapter),
        *("--model.tokenizer", tokenizer_of(setting.task)),
        *("--data.tasks", task, "--data.response_length", setting.length),
        *("--data.methods", f"[{', '.join(setting.methods)}]"),
    )
    return folder / "stack" / "results"


Arms = dict[str, dict[str, tuple[NDArray[Any], NDArray[Any]]]]
"""By method and arm: forwards and verdicts, both of shape (seeds, problems)."""


def arms(decodes: Decodes, name: str) -> Arms:
    """Returns the decodes of a setting."""
    found: Arms = {}
    for (setting, _, method), values in decodes.items():
        if setting.partition(", ")[0] == name:
            found.setdefault(method, {})[setting.partition(", ")[2]] = values
    return found


def gain(found: Arms, *methods: str) -> NDArray[Any]:
    """Returns verdicts of the decode's states less those of random ones, means over methods."""
    gains = [found[method]["decode"][1] - found[method]["random"][1] for method in methods]
    return np.mean(gains, axis=0)


def gain_at_equal_forwards(found: Arms, method: str) -> NDArray[Any] | None:
    """Returns the same, with the line through the two thresholds of random states for these."""
    stem = method.rpartition("_")[0]
    forwards, right = found[method]["decode"]
    ends = [found[f"{stem}_{level}"]["random"] for level in ("06", "09")]
    mixed = between(ends, float(forwards.mean()))
    return None if mixed is None else right - mixed


def markdown(decodes: Decodes) -> str:
    """Returns two tables in per cent and points: with fixed steps, and with thresholds.

    A cell has the accuracy of training on the decode's states, with its forwards where they are not
    fixed, and the difference to random states; in brackets that at equal forwards, where it is
    known.
    """
    fixed, fast = [["setting", *ORDER, "judged"]], [["setting", *FAST]]
    for name, setting in SETTINGS.items():
        if not (found := arms(decodes, name)):
            continue
        judged = f"**{points(gain(found, *setting.judged))}**"
        if setting.decoder is None:
            cells = [f"{rate(found, method)}, {points(gain(found, method))}" for method in ORDER]
            fixed.append([name, *cells, judged])
        fast.append([name])
        for method in FAST:
            equal = gain_at_equal_forwards(found, method)
            fast[-1].append(
                f"{rate(found, method)} @ {found[method]['decode'][0].mean():.1f}, "
                f"{points(gain(found, method))}{'' if equal is None else f' ({points(equal)})'}"
            )
    return table(fixed) + "\n" + table(fast)


def rate(found: Arms, method: str) -> str:
    """Returns right answers in per cent after training on the decode's states."""
    return f"{100 * found[method]['decode'][1].mean():.1f}"


def draw(decodes: Decodes, path: Path) -> None:
    """Draws the judged differences, with two standard errors."""

    def figure(theme: Theme) -> Figure:
        drawn = Figure(figsize=(6.4, 2.8), layout="constrained")
        axis = drawn.subplots()
        names = [name for name in SETTINGS if arms(decodes, name)]
        for height, name in enumerate(names):
            found, setting = arms(decodes, name), SETTINGS[name]
            shown = [gain(found, *setting.judged)]
            if setting.decoder is not None:
                equal = gain_at_equal_forwards(found, *setting.judged)
                shown += [] if equal is None else [equal]
            styles = method_styles(["tracerl", "tracerl at equal forwards"], theme)
            for number, (values, style) in enumerate(zip(shown, styles, strict=False)):
                axis.errorbar(
                    100 * values.mean(),
                    height + 0.25 * number,
                    xerr=200 * standard_error(values),
                    capsize=3,
                    **style,
                )
        axis.axvline(0, color=theme.muted, linewidth=1)
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.set_xlabel("gain in points over random states (hollow: at equal forwards)")
        tidy_axes(axis)
        return drawn

    save_themes(path, figure)


if __name__ == "__main__":
    main()
