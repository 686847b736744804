"""Milliseconds that rules and learned policies of the policy bench take for a word problem.

Rules are those of the bench's validation list that are more accurate than all that take fewer
forwards, from 92 % on, thresholds apart, with and without a cache; the learned policy is the one
that ships with ``tiny``, at its threshold, in three windows. It needs a machine with nothing else
on it, and takes one thread.

    python experiments/policy_clock.py --out runs/policy_clock  # measures
    python experiments/policy_clock.py  # prints the tables of the published results
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
from chain import call, parser, problems, table
from every_window import PAGES
from policy_bench import CONFIGS, NAME, OURS, POLICIES, WINDOWS, Cell, Decodes, read, shown

from lit_dlm.reports.results import ResultFolder
from lit_dlm.system.files import write_atomically

BATCHES = (1, 16, 64)
ROUNDS = 6
SIZE = 128
"""Problems of a round."""
LEAST = 0.92
"""Accuracy on the validation list, of the fastest rules."""
NEAR = 0.005
"""How much less accurate a rule may be that a learned policy is compared with."""
SEED, THRESHOLD = 3, "0.8"
"""Of the policy that ships, among those of ``every_window.py``."""
POLICY = {"class_path": "TraceLockPolicy", "init_args": {"path": "tiny"}}


def main() -> None:
    """Measures if there is a folder for it, then prints the tables."""
    options = parser(__doc__).parse_args()
    kept = (options.out or PAGES / "every_window") / "policy_clock.json"
    if options.out:
        write_atomically(kept, json.dumps(measured(options.out), indent=1) + "\n")
    print(markdown(json.loads(kept.read_text())))


def measured(out: Path) -> dict[str, Any]:
    """Decodes in batches of each size, in turn.

    Returns, by cell and batch, milliseconds a problem and the policy's share of them in each round.
    """
    lists = read(PAGES / "policies" / NAME, PAGES / "every_window" / "every_window.parquet")
    test = lists["words", "test"]
    cells = front(lists["words", "validation"])
    cells += [("every", window, THRESHOLD) for window in ("whole", "blocks-16", "cache")]
    decoders = {name(cell): decoder(cell) for cell in cells}
    config = {
        "defaults": str(CONFIGS / "method" / "benchmark.yaml"),
        "model": {
            "init_args": {
                "backbone": str(CONFIGS / "backbone" / "tiny.yaml"),
                "tokenizer": "tiny",
                "decoders": decoders,
            }
        },
    }
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "decoders.yaml", json.dumps(config))
    for number, batch in itertools.product(range(ROUNDS), BATCHES):
        folder = out / f"{number}-{batch}"
        call(
            folder / "done",
            *("predict", "--config", out / "decoders.yaml", "--run_dir", folder),
            *("--data.tasks", problems("WordProblems", "test", SIZE, seed=17)),
            *("--data.response_length", 32, "--data.batch_size", batch),
        )
    found: dict[str, Any] = {}
    for cell in cells:
        seed = SEED if cell[0] == "every" else 0
        found[shown(cell)] = {
            "right": float(test.correct[cell][seed].mean()),
            "forwards": float(test.forwards[cell][seed].mean()),
        }
        for batch in BATCHES:
            found[shown(cell)][f"batch {batch}"] = rounds = []
            for number in range(ROUNDS):
                results = ResultFolder(out / f"{number}-{batch}" / "results")
                rows = results.rows("word_problems", name(cell))
                whole, own = np.mean([(row.seconds, row.policy_seconds) for row in rows], axis=0)
                rounds.append((round(float(1000 * whole), 3), round(float(own / whole), 4)))
    return found


def name(cell: Cell) -> str:
    """Returns a cell's name in configurations."""
    return "_".join((cell[0], cell[2], cell[1]))


def decoder(cell: Cell) -> dict[str, Any]:
    """Returns the parts of a cell's decoder."""
    policy, window, setting = cell
    own = {"policy": POLICY, "quota": "NoQuota"} if policy == "every" else POLICIES[policy][setting]
    return {**own, **WINDOWS[window]}


def front(validation: Decodes) -> list[Cell]:
    """Returns the rules that are more accurate than all of their kind in fewer forwards.

    Thresholds are a kind of their own, as their forwards take the least time.
    """
    learned = {*OURS, "tracelock", "pc-sampler"}  # this one needs counts of tokens, and 32 forwards
    best: dict[tuple[bool, bool], Cell] = {}
    found = []
    for cell in sorted(validation.correct, key=validation.point):
        kind, right = (cell[1] == "cache", cell[0] == "threshold"), validation.point(cell)[1]
        if cell[0] in learned or (kind in best and right <= validation.point(best[kind])[1]):
            continue
        best[kind] = cell
        if right > LEAST:
            found.append(cell)
    return found


def markdown(results: dict[str, Any]) -> str:
    """Returns times of all, and of learned policies beside rules that are as accurate.

    The first table has medians over rounds and the policy's share, the second one medians and
    extremes of the ratio of both times in a round; the rule is the one with the fewest forwards.
    """
    lines = [["policy", "right, %", "forwards", *(f"batch {batch}" for batch in BATCHES)]]
    for cell, one in results.items():
        times = [np.median(one[f"batch {batch}"], axis=0) for batch in BATCHES]
        entries = [f"{taken:.1f} ms, {100 * share:.1f} %" for taken, share in times]
        lines.append([cell, f"{100 * one['right']:.1f}", f"{one['forwards']:.1f}", *entries])
    beside = [["policy", "rule", *(f"batch {batch}" for batch in BATCHES)]]
    rules = [cell for cell in results if not cell.startswith("every")]
    for cell in [cell for cell in results if cell not in rules]:
        own = results[cell]
        alike = [one for one in rules if one.endswith("cache") == cell.endswith("cache")]
        near = [one for one in alike if results[one]["right"] >= own["right"] - NEAR]
        rule = min(near, key=lambda one: results[one]["forwards"])
        ratios = [
            np.divide(own[name], results[rule][name])[:, 0]
            for name in (f"batch {batch}" for batch in BATCHES)
        ]
        entries = [f"{np.median(one):.2f} ({one.min():.2f} to {one.max():.2f})" for one in ratios]
        beside.append([cell, rule, *entries])
    return table(lines) + "\n" + table(beside)


if __name__ == "__main__":
    main()
