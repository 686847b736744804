"""What each part of training on outcomes contributes, on the lists of the policy bench.

Arms start from the bench's traces and distilled policies, train on equally many decodes and differ
in one thing each; settings are chosen on the bench's validation list and reported on its test list.
On words, with whole responses: ``product`` has the reward of arXiv 2512.09106; ``held`` adds a
divergence to its start (2510.05725); ``new`` starts from random weights; ``scalars`` does too, and
sees no hidden states; ``scalars-product`` combines it with ``product``, as 2512.09106 does.
``weights`` is TraceRL on the model itself, with thresholds. On functions, in blocks with a dual
cache: ``cached`` rolls out with that cache. ``carried`` uses the other task's policies, ``shipped``
the policy that ships with the model; in the published results a former one, for whole responses.

    python experiments/outcome_ablations.py --out runs/policy_bench  # makes what is missing
    python experiments/outcome_ablations.py  # prints the table of the published results
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from chain import Decodes, call, keep_decodes, parser, points, read_decodes, seed_flags, table
from policy_bench import (
    LEVELS,
    LIST_SEED,
    POLICIES,
    SIZE,
    TRAINED_BLOCK,
    WINDOWS,
    block,
    cells,
    decode,
    decoder_flags,
    distil,
    list_folder,
    problem_list,
    run_of,
    swept,
    train_on_outcomes,
)

ARMS = {
    ("words", "whole"): (
        "distilled",
        "outcome",
        "product",
        "held",
        "new",
        "scalars",
        "scalars-product",
        "weights",
        "carried",
        "shipped",
    ),
    ("functions", "whole"): ("distilled", "outcome", "carried", "shipped"),
    ("functions", "cache"): ("distilled", "outcome", "cached"),
}
"""By task and window; ``outcome`` is what the bench trains for that window."""

PRODUCT = ("--data.rewards", '[{"class_path": "lit_dlm.rewards.speed.RightAndFast"}]')
OTHER = {"words": "functions", "functions": "words"}


def main() -> None:
    """Makes what is missing, then prints the table."""
    words = parser(__doc__, 0, 1, 2)
    words.add_argument("--task", nargs="+", choices=OTHER, default=list(OTHER))
    words.add_argument("--arms", nargs="+", help="only these")
    options = words.parse_args()
    options.list_seed, options.num_examples = LIST_SEED, SIZE
    kept = (options.out or Path("docs/results/outcome_policies")) / "outcome_ablations.parquet"
    if options.out:
        runs = []
        for seed in options.train_seeds:
            for (task, window), arms in ARMS.items():
                for arm in arms:
                    is_wanted = task in options.task and arm in (options.arms or arms)
                    if is_wanted and (arm != "shipped" or seed == 0):
                        folder = options.out / "ablations" / f"{task}-{window}-{arm}-s{seed}"
                        made = measure(options, task, window, arm, seed, folder)
                        runs += [(f"{task}, {window}, {arm}, {w}", seed, f) for w, f in made]
        keep_decodes(kept, runs)
    print(markdown(read_decodes(kept)))


def measure(
    options: argparse.Namespace, task: str, window: str, arm: str, seed: int, folder: Path
) -> list[tuple[str, Path]]:
    """Trains an arm with a seed, decodes both lists and returns their names and result folders."""
    more: list[Any] = []
    if arm == "weights":
        reinforce(options, task, seed, folder)
        decoders = cells({arm: POLICIES["threshold"]}, [window])
        more = ["--model.backbone.init_args.adapter", folder / "policy" / "last"]
    else:
        path = policy(options, task, window, arm, seed, folder)
        taken = {"path": str(path), "max_accept_per_step": None}
        swept_arm = swept("TraceLockPolicy", "threshold", *LEVELS[::2], **taken)
        decoders = cells({arm: swept_arm}, [window])
    found = []
    for which in ("validation", "test"):
        decode(options, task, which, folder, decoders, *more)
        found.append((which, list_folder(options, which, folder) / window / "results"))
    return found


def policy(
    options: argparse.Namespace, task: str, window: str, arm: str, seed: int, folder: Path
) -> str | Path:
    """Returns the policy of an arm, which is trained if it is missing."""
    if arm == "shipped":
        return "tiny"
    run = run_of(options, OTHER[task] if arm == "carried" else task, seed)
    distil(options, run.parent.name, seed, run)
    start: list[Any] = ["--model.policy", run / "policy"]
    if arm == "distilled":
        return run / "policy"
    if arm in ("outcome", "carried"):  # as the bench trains it
        folder = run / ("whole" if window == "whole" else "blocks")
        arm_flags: list[Any] = [] if window == "whole" else decoder_flags(block(TRAINED_BLOCK))
    elif arm == "cached":
        arm_flags = decoder_flags(WINDOWS["cache"])
    elif arm == "held":
        arm_flags = ["--model.objective.kl_to", "initial", "--model.objective.beta", 0.1]
    else:
        arm_flags = list(PRODUCT) if arm.endswith("product") else []
        if arm != "product":
            head = json.loads((run / "policy" / "config.json").read_text())["head"]
            start = ["--model.policy", "null", "--model.projector", run / "projector"]
            start += ["--model.head", json.dumps(head)]
        if arm.startswith("scalars"):
            arm_flags += ["--model.settings", '{"features": {"hidden": false}}']
    train_on_outcomes(options, run.parent.name, seed, folder, *start, *arm_flags)
    return folder / "outcome" / "policy" / "best"


def reinforce(options: argparse.Namespace, task: str, seed: int, folder: Path) -> None:
    """Runs TraceRL with an adapter on equally many decodes of the same problems."""
    callbacks = [
        {
            "class_path": "AdapterCheckpoint",
            "init_args": {"folder": str(folder / "policy"), "every_n_epochs": 10},
        },
        {
            "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
            "init_args": {
                "dirpath": str(folder / "checkpoints"),
                "filename": "last",
                "enable_version_counter": False,
            },
        },
    ]
    call(
        folder / "done",
        *("fit", "--config", "exp/tracerl_tiny", *seed_flags(seed), "--run_dir", folder),
        *("--ckpt_path", "last", "--trainer.callbacks", json.dumps(callbacks)),
        *("--trainer.max_epochs", 100, "--trainer.check_val_every_n_epoch", 10),
        *("--data.prompts_per_step", 40, "--data.responses_per_prompt", 8),
        *("--data.tasks", problem_list(task, "train", 4000, 1000 + seed)),
        *("--data.val_tasks", problem_list(task, "train", 300, 100)),
    )


def markdown(decodes: Decodes) -> str:
    """Returns a table of every arm at its best validation level, compared with ``outcome``."""
    best: dict[str, Any] = {}
    for (arm, name, cell), (forwards, right) in decodes.items():
        place, which = arm.rsplit(", ", 1)
        if which == "validation":
            value = (right.mean(), -forwards.mean(), cell)
            if place not in best or value > best[place][0]:
                best[place] = value, decodes[place + ", test", name, cell]
    lines = [["task", "window", "arm", "right", "forwards", "right, less outcome", "forwards"]]
    for place, (_, (forwards, right)) in sorted(best.items()):
        task, window, arm = place.split(", ")
        line = [task, window, arm, points(right, ""), f"{forwards.mean():.1f}"]
        base = best[f"{task}, {window}, outcome"][1]
        if arm != "outcome":
            line += [points(right - base[1]), f"{(forwards - base[0]).mean():+.1f}"]
        lines.append(line + [""] * (7 - len(line)))
    return table(lines)


if __name__ == "__main__":
    main()
