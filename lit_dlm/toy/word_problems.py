"""Chains of additions and subtractions told as a story, graded like GSM8K.

``Tom has 34 pens, finds 7, loses 5. How many pens?`` is answered by ``34+7=41 so 41-5=36`` and a
last line ``#### 36``; every partial sum needs the one before it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from lit_dlm.tasks.base import PromptExample
from lit_dlm.toy.generated import GeneratedTask, Problem

NAMES = ("Tom", "Ann", "Sam", "Mia", "Ben", "Eva", "Leo", "Zoe")
ITEMS = ("pens", "cups", "eggs", "keys", "figs", "nuts", "hats", "toys")
GAINS = ("finds", "buys", "gets", "wins")
LOSSES = ("loses", "sells", "eats", "gives")
SEPARATORS = ("\n", " so ", " then ")

MAX_COMPLETION_TOKENS = 31  # in pieces of the tiny tokenizer; the end of text needs one

# A piece of the tiny tokenizer: every digit, every sign and every separator is one.
_PIECE = re.compile(r"\n#### |\d|[-+=]| so | then |\n")
_ANSWER = re.compile(r"####\s*(-?\d{1,400})(?!\d)")


def write_solution(start: int, moves: Sequence[int], rng: random.Random) -> str:
    """Writes a right solution; the separator and the order of each sum's operands are drawn."""
    steps, total = [], start
    for move in moves:
        left, right = f"{total}", f"{abs(move)}"
        if move > 0 and rng.random() < 0.5:
            left, right = right, left
        total += move
        steps.append(f"{left}{'+' if move > 0 else '-'}{right}={total}")
    return rng.choice(SEPARATORS).join(steps) + f"\n#### {total}"


class WordProblems(GeneratedTask):
    """Generated word problems; a reference holds ``start``, signed ``moves`` and ``answer``."""

    name = "word_problems"
    missing = "no number after '####'"

    def draw(self, rng: random.Random) -> Problem:
        """Draws a problem with totals in 0..99 and a solution within ``MAX_COMPLETION_TOKENS``."""
        while True:
            # Two kinds, as both do not fit: many steps of one digit each, or few with two digits.
            if rng.random() < 0.7:
                start, num_steps, low = rng.randint(1, 9), rng.randint(2, 4), 1
            else:
                start, num_steps, low = rng.randint(10, 59), rng.randint(1, 3), 2
            moves = [rng.choice((-1, 1)) * rng.randint(low, 9) for _ in range(num_steps)]
            totals = list(accumulate(moves, initial=start))[1:]
            pieces = _PIECE.findall(write_solution(start, moves, random.Random(0)))
            is_short = len(pieces) <= MAX_COMPLETION_TOKENS
            if min(totals) >= 0 and max(totals) <= 99 and is_short:
                break
        item = rng.choice(ITEMS)
        events = ", ".join(f"{rng.choice(GAINS if m > 0 else LOSSES)} {abs(m)}" for m in moves)
        return Problem(
            key=f"{start}" + "".join(f"{m:+d}" for m in moves),
            text=f"{rng.choice(NAMES)} has {start} {item}, {events}. How many {item}?",
            reference={"start": start, "moves": moves, "answer": totals[-1]},
        )

    def write_answer(self, reference: dict[str, Any], rng: random.Random) -> str:
        return write_solution(reference["start"], reference["moves"], rng)

    def draw_drill(self, rng: random.Random) -> str:
        equations = []
        for _ in range(5):
            a, b = rng.randint(0, 75), rng.randint(1, 9)
            # Small numbers are what stories begin with, and what larger sums are made of.
            if rng.random() < 0.4:
                a = rng.randint(1, 18)
            if rng.random() < 0.5 and a >= b:
                equations.append(f"{a}-{b}={a - b}")
            else:
                left, right = (a, b) if rng.random() < 0.5 else (b, a)
                equations.append(f"{left}+{right}={a + b}")
        return rng.choice(SEPARATORS).join(equations)

    def extract(self, example: PromptExample, completion: str) -> str | None:
        answers = _ANSWER.findall(completion)
        return str(int(answers[-1])) if answers else None  # 036 is 36
