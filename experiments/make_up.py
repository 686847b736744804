"""What the bench's test lists are made of, by their length, and its contests if they had the mix.

A list of distinct problems loses kinds that have few of them as it grows. The second table is that
of the bench's kept decodes, with problems weighted so that kinds have the shares of the generator.

    python experiments/make_up.py
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from chain import table
from numpy.typing import NDArray
from policy_bench import CONTESTS, LIST_SEED, NAME, SIZE, TASKS, Decodes, contest, interval, read

from lit_dlm import toy
from lit_dlm.toy.generated import GeneratedTask

LENGTHS = (100, 300, 1_000, 3_000, 10_000)
REWEIGHTED = ("words", "functions")


def main() -> None:
    """Prints both tables."""
    print(make_up(LENGTHS))
    print(reweighted(read(Path("docs/results/policies") / NAME)))


def kind(name: str, reference: dict[str, Any]) -> str:
    """Returns which of a task's few kinds a problem is of."""
    if name.endswith("functions"):
        spec = reference["spec"]
        return spec.get("fold") or f"chain of {len(spec['operations'])}"
    if name == "words":
        size = "one digit" if reference["start"] < 10 else "two digits"
        return f"{size}, {len(reference['moves'])} moves"
    if name == "countdown":
        return "products" if set("*/") & set(reference["solution"]) else "sums alone"
    if name == "pictures":
        return f"sum {'below 7' if int(reference['answer']) < 7 else '7 or more'}"
    if name == "sudoku":
        return f"{'up to 8' if reference['puzzle'].count('0') < 9 else 'more'} blanks"
    pairs = zip(reference["a"], reference["b"], strict=True)
    return f"{'up to 3' if sum(int(a) + int(b) == 9 for a, b in pairs) < 4 else 'more'} nines"


def task_of(name: str, length: int) -> GeneratedTask:
    """Returns a task with the bench's test list, at some length."""
    options = {"split": "test", "num_examples": length, "seed": LIST_SEED, **TASKS[name].options}
    found: GeneratedTask = getattr(toy, TASKS[name].name)(**options)
    return found


def kinds(name: str, length: int) -> list[str]:
    """Returns the kinds of the problems of a test list, in order."""
    return [kind(name, one.reference) for one in task_of(name, length).examples()]


def drawn(name: str, count: int = 10_000) -> Counter[str]:
    """Counts the kinds of problems as they are drawn, equal ones among them."""
    task, rng = task_of(name, 1), random.Random(0)
    return Counter(kind(name, task.draw(rng).reference) for _ in range(count))


def make_up(lengths: Sequence[int]) -> str:
    """Returns the shares of kinds as Markdown, in per cent: as drawn, and in lists by length."""
    lines: list[Sequence[str]] = [["task", "kind", "as drawn", *(f"{n:,}" for n in lengths)]]
    for name in TASKS:
        shares = drawn(name)
        longest: list[str] = []
        for length in lengths[::-1]:
            try:  # a list begins with the shorter ones
                longest = kinds(name, length)
                break
            except ValueError:  # there are not so many problems
                continue
        for one in sorted(shares):
            parts = [
                f"{longest[:n].count(one) / n:.1%}" if n <= len(longest) else "" for n in lengths
            ]
            lines.append([name, one, f"{shares[one] / shares.total():.1%}", *parts])
    return table(lines).replace("%", "")


def weights(name: str) -> NDArray[Any]:
    """Returns weights (problems) of the test list, of mean 1, that give kinds their shares."""
    listed, shares = kinds(name, SIZE), drawn(name)
    counts = Counter(listed)
    return np.array([shares[one] / shares.total() * SIZE / counts[one] for one in listed])


def reweighted(results: dict[tuple[str, str], Decodes]) -> str:
    """Returns the contests with lists that have the generators' mixes as Markdown."""
    lines = [
        ["task", "where", "outcome TraceLock", "best of the others there", "difference [95 %]"]
    ]
    for name in REWEIGHTED:
        test, by = results[name, "test"], weights(name)
        weighted = Decodes(
            {cell: right * by for cell, right in test.correct.items()},
            {cell: count * by for cell, count in test.forwards.items()},
            test.shares,
        )
        for where, windows in CONTESTS.items():
            if found := contest(results[name, "validation"], weighted, windows):
                _, forwards, accuracy, _ = found["ours"]
                ours = f"{100 * accuracy:.1f} @ {forwards:.1f}"
                theirs = f"{100 * found['theirs'][3]:.1f}"
                lines.append([name, where, ours, theirs, interval(*found["difference"])])
    return table(lines)


if __name__ == "__main__":
    main()
