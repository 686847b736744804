"""A TraceLock policy for a second task, from random weights or from the policy of a first one.

The policies of words are the policy bench's, distilled from traces. For functions there are traces
of few problems; a policy is trained on them for equally many updates either way, and decodes test
problems on whole responses. ``docs/results/elsewhere`` has the plan, which was written before
the runs.

    python experiments/warm_start.py --out runs/policy_bench  # makes what is missing
    python experiments/warm_start.py  # prints the table of the kept decodes
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from chain import (
    Decodes,
    between,
    call,
    keep_decodes,
    parser,
    points,
    problems,
    read_decodes,
    seed_flags,
    table,
)
from policy_bench import distil, gain, run_of

COUNTS = (25, 100, 400)  # problems that traces are made of, one decode of each
UPDATES = (100, 500)
ARMS = ("random", "warm")
THRESHOLDS = (0.8, 0.9, 0.95, 0.99)
TASK = "PythonFunctions"


def main() -> None:
    """Makes what is missing, then prints the table."""
    options = parser(__doc__, 0, 1, 2).parse_args()
    kept = (options.out or Path("docs/results/elsewhere")) / "warm_start.parquet"
    if options.out:
        rule = options.out / "warm_start" / "rule"
        runs = [("rule", 0, decode(rule, {"class_path": "ThresholdPolicy", "init_args": {}}))]
        for seed in options.train_seeds:
            words = run_of(options, "words", seed)
            distil(options, "words", seed, words)
            own = options.out / "warm_start" / f"s{seed}"
            runs.append(("0, 0, warm", seed, decode(own, learnt(words / "policy"))))
            for count, updates, arm in itertools.product(COUNTS, UPDATES, ARMS):
                folder = own / f"functions-{count}" / f"{arm}-{updates}"
                train(folder, arm, count, updates, seed, words)
                found = decode(folder, learnt(folder / "policy"))
                runs.append((f"{count}, {updates}, {arm}", seed, found))
        keep_decodes(kept, runs)
    print(markdown(read_decodes(kept)))


def train(folder: Path, arm: str, count: int, updates: int, seed: int, words: Path) -> None:
    """Makes traces, unless they are there, and trains a policy, in the folder ``policy``."""
    traced = folder.parent
    listed = problems(TASK, "train", count, seed=seed, allow_code_execution=True)
    call(
        traced / "traced",
        *("predict", "--config", "exp/generate_tiny", "--run_dir", traced),
        *("--seed_everything", seed, "--model.seed", seed, "--data.tasks", listed),
        *("--model.projector_dir", words / "projector"),  # a policy brings its own
    )
    start = {
        "random": ("--model.projector", words / "projector"),
        "warm": ("--model.projector", "null", "--model.policy", words / "policy"),
    }
    call(
        folder / "trained",
        *("fit", "--config", "exp/tracelock_tiny", *seed_flags(seed), *start[arm]),
        *("--run_dir", folder, "--data.shards", traced / "traces", "--ckpt_path", "last"),
        *("--trainer.max_steps", updates, "--trainer.val_check_interval", updates // 5),
        *("--data.val_fraction", 0.25 if count < 100 else 0.1),  # else there may be none
    )


def learnt(policy: Path) -> dict[str, object]:
    """Returns a policy as a component."""
    options = {"path": str(policy), "max_accept_per_step": None}
    return {"class_path": "TraceLockPolicy", "init_args": options}


def decode(folder: Path, policy: dict[str, object]) -> Path:
    """Decodes test problems at all thresholds; returns the folder of the results."""
    sweep = {
        "at": {
            "decoder": {"policy": policy, "quota": "NoQuota"},
            "option": "policy.threshold",
            "values": THRESHOLDS,
        }
    }
    call(
        folder / "decodes" / "done",
        *("predict", "--config", "exp/evaluate_tiny", "--run_dir", folder / "decodes"),
        *("--model.decoders", "null", "--model.sweep", json.dumps(sweep), "--data.methods", "null"),
        *("--data.tasks", problems(TASK, "test", 500, allow_code_execution=True)),
    )
    return folder / "decodes" / "results"


def markdown(decodes: Decodes) -> str:
    """Returns accuracy @ forwards by problems, start and threshold, and the gain of the start."""
    found: dict[str, list[tuple]] = {}
    for (arm, _, _), values in sorted(decodes.items()):
        found.setdefault(arm, []).append(values)
    lines = [["problems", "updates", "start", *map(str, THRESHOLDS)]]
    both = itertools.product(COUNTS, UPDATES, ARMS)
    for arm in ("rule", "0, 0, warm", *(", ".join(map(str, one)) for one in both)):
        *head, start = arm.split(", ")
        shown = [f"{points(right, '')} @ {cost.mean():.1f}" for cost, right in found[arm]]
        lines.append([*(head or ["", ""]), start, *shown])
        if (other := f"{', '.join(head)}, random") in found and start == "warm":
            pairs = zip(found[arm], found[other], strict=True)
            lines.append([*head, "difference [95 %]", *(gain(a[1] - b[1]) for a, b in pairs)])
            shown = []
            for cost, right in found[arm]:
                theirs = between(found[other], float(cost.mean()))
                shown.append("" if theirs is None else gain(right - theirs))
            lines.append([*head, "at equal forwards [95 %]", *shown])
    return table(lines)


if __name__ == "__main__":
    main()
