"""What editing is worth: accuracy against forwards with and without it, on a model trained to edit.

All weights of the embedded model are fine-tuned on the same answers with each seed: ``sft`` on
masks, ``edit`` on masks, wrong tokens and own writes (``exp/edit_tiny``). Thresholds decode both
and the model as it was (``tiny``); ``TokenEditingPolicy`` decodes ``edit``, and ``ebpo``,
which goes on from it by RL on words. Lists, choice of settings and contests are those of
``policy_bench.py``. ``docs/results/editing`` has the plan, which
was written before the runs.

    python experiments/editing.py --out runs/editing  # makes what is missing
    python experiments/editing.py  # prints the tables of the published results
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
from chain import BARE, call, parser, seed_flags, table
from policy_bench import (
    LIST_SEED,
    NEAR,
    SIZE,
    Decodes,
    cells,
    collected,
    contests,
    decode,
    fronts,
    interval,
    problem_list,
    read as read_decodes,
    run_of,
    shown,
    standard_error,
    swept,
    validated,
    write_table,
)

TASKS = ("words", "functions")
WINDOWS = ("whole", "blocks-8")
ARMS = {
    "tiny": None,
    "sft": "exp/sft_gt_tiny",
    "fill": "exp/sft_gt_tiny",
    "edit": "exp/edit_tiny",
    "ebpo": "exp/tracerl_tiny",
}
"""Experiment that trains each arm; ``fill`` learns the fill behind answers, too."""
UPDATES = 2000
EXAMPLES = {"words": 4000, "functions": 700}  # that a model is trained on

WITHOUT = swept("ThresholdPolicy", "threshold", 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
WITH = {
    f"{mask:g}-{edit:g}": {
        "policy": {
            "class_path": "TokenEditingPolicy",
            "init_args": {"threshold": mask, "edit_threshold": edit},
        },
        "quota": "NoQuota",
    }
    for mask, edit in itertools.product((0.3, 0.5, 0.7, 0.9), (0.5, 0.7, 0.9))
}
"""Thresholds of masks and of tokens that stand."""
CONTESTS = {
    "thresholds on the same model": ("editing-edit", "threshold-edit"),
    "thresholds on any of the models": (
        *("editing-edit", "threshold-tiny", "threshold-sft", "threshold-edit"),
    ),
    "editing before EBPO": ("editing-ebpo", "editing-edit"),
}
"""A policy on a model, and those that it is compared with."""


def policies(arm: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns the settings that decode an arm, by the policy's name and the arm's."""
    editing = {f"editing-{arm}": WITH}
    if arm == "ebpo":
        return editing
    return {f"threshold-{arm}": WITHOUT} | (editing if arm == "edit" else {})


def main() -> None:
    """Makes what is missing, then prints the tables."""
    words = parser(__doc__, 0, 1, 2, 3, 4)
    words.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    words.add_argument("--updates", type=int, default=UPDATES)
    words.add_argument(
        "--seed", type=int, default=LIST_SEED, dest="list_seed", help="of test lists"
    )
    words.add_argument("--num_examples", type=int, default=SIZE, help="of test lists")
    options = words.parse_args()
    kept = (options.out or Path("docs/results/editing")) / "editing.parquet"
    if options.out:
        decodes = pa.concat_tables([make(options, arm) for arm in ARMS])
        write_table(kept, decodes.unify_dictionaries())
    print(markdown(read_decodes(kept)))


def make(options: argparse.Namespace, arm: str) -> pa.Table:
    """Trains the models of an arm, decodes both lists with them, and returns the decodes."""
    own = argparse.Namespace(**{**vars(options), "out": options.out / arm})
    if not ARMS[arm]:
        own.train_seeds = []
    if arm == "ebpo":
        own.task = options.task[:1]  # what its experiment trains on
    seeds = own.train_seeds or [-1]
    flags = {seed: train(own, arm, seed) for seed in seeds}
    decoders = cells(policies(arm), WINDOWS)
    for name in own.task:
        for seed in seeds:
            decode(own, name, "validation", run_of(own, name, seed), decoders, *flags[seed])
        chosen = fronts(validated(own, name, seeds))
        taken = {cell: decoders[cell] for cell in decoders if cell in chosen}
        for seed in seeds:
            decode(own, name, "test", run_of(own, name, seed), taken, *flags[seed])
    return collected(own)


def train(own: argparse.Namespace, arm: str, seed: int) -> list[Any]:
    """Trains all weights, or an adapter by RL; returns the flags of the model."""
    experiment = ARMS[arm]
    if experiment is None:
        return []
    folder = own.out / f"model-{seed}"
    if arm == "ebpo":
        model = ("--model.backbone.init_args.path", own.out.parent / "edit" / folder.name / "model")
        call(
            folder / "done",
            *("fit", "--config", experiment, "--config", "method/ebpo", *seed_flags(seed)),
            *("--run_dir", folder, *model),
        )
        return [*model, "--model.backbone.init_args.adapter", folder / "policy" / "last"]
    tasks = [json.loads(problem_list(name, "train", n, seed))[0] for name, n in EXAMPLES.items()]
    source = {"class_path": "TaskReferences", "init_args": {"tasks": tasks}}
    fill = ("--model.num_padding", "null") if arm == "fill" else ()
    call(
        folder / "done",
        *("fit", "--config", experiment, *fill, *seed_flags(seed), "--run_dir", folder),
        *("--trainer.max_steps", own.updates, "--data.sources", json.dumps([source]), *BARE),
        *("--model.backbone.init_args.lora", "null"),
        *("--model.backbone.init_args.trainable", "true", "--model.export_dir", folder / "model"),
    )
    # The exported model says itself that it was trained to edit.
    return ["--model.backbone.init_args.path", folder / "model"]


# -- results ---------------------------------------------------------------------------------------


def among(decodes: Decodes, policies: tuple[str, ...]) -> Decodes:
    """Returns the cells of some policies."""
    correct = {cell: right for cell, right in decodes.correct.items() if cell[0] in policies}
    return Decodes(correct, decodes.forwards, decodes.shares)


def contests_table(results: dict[tuple[str, str], Decodes], within: float) -> str:
    """Contests at equal forwards, by cells up to ``within`` below the first one's best."""
    lines = [["task", "where", "against", "editing", "the others", "difference [95 %]", "p"]]
    for against, (ours, *rivals) in CONTESTS.items():
        every = {key: among(one, (ours, *rivals)) for key, one in results.items()}
        some = {key: one for key, one in every.items() if any(c[0] == ours for c in one.correct)}
        for task, where, one, p in contests(some, within, ours):
            cell, forwards, right, error = one["ours"]
            fast, slow, share, rate = one["theirs"]
            by = shown(slow) if share > 0.995 or fast == slow else f"{shown(fast)}, {shown(slow)}"
            found = f"{100 * right:.1f} ± {100 * error:.1f} @ {forwards:.1f} ({cell[2]})"
            difference = interval(*one["difference"])
            lines.append(
                [task, where, against, found, f"{100 * rate:.1f} ({by})", difference, f"{p:.2g}"]
            )
    return table(lines)


def tests_table(results: dict[tuple[str, str], Decodes]) -> str:
    """Everything that decoded the test lists, in per cent right ± standard error @ forwards."""
    tests = {task: one for (task, which), one in results.items() if which == "test"}
    lines = [["policy and model", "window", "setting", *tests]]
    for cell in sorted({cell for one in tests.values() for cell in one.correct}):
        line = list(cell)
        for one in tests.values():
            if cell in one.correct:
                forwards, rate = one.point(cell)
                error = standard_error(one.correct[cell])
                line.append(f"{100 * rate:.1f} ± {100 * error:.1f} @ {forwards:.1f}")
            else:
                line.append("")
        lines.append(line)
    return table(lines)


def markdown(results: dict[tuple[str, str], Decodes]) -> str:
    """Returns both contests, and all that decoded the test lists."""
    contested = (contests_table(results, within) for within in (0.0, NEAR))
    return "\n".join((*contested, tests_table(results)))


if __name__ == "__main__":
    main()
