"""Sums of two long numbers, where the order of decoding decides.

Both numbers and the sum have a fixed width, so ``0483+0917`` is answered by ``01400``. A run of
columns whose digits add up to nine hides the carry from everything to the left: written from the
right, each digit is easy, in another order some are guesses (arXiv 2605.29123).
"""

from __future__ import annotations

import random
import re

from lit_dlm.tasks.base import PromptExample
from lit_dlm.toy.generated import GeneratedTask, Problem

NUM_DIGITS = 8  # digits of both numbers; the sum has one more
NINE_SHARE = 0.4  # of columns made to add up to nine; of the others, one in ten does


class Addition(GeneratedTask):
    """Generated sums, see the module; a reference holds ``a``, ``b`` and ``answer``."""

    name = "addition"
    missing = "no digit in the completion"

    def draw(self, rng: random.Random) -> Problem:
        columns = []
        for _ in range(NUM_DIGITS):
            # Drawn evenly, few carries would run through more than two columns: any order would do.
            a = rng.randint(0, 9)
            columns.append((a, 9 - a if rng.random() < NINE_SHARE else rng.randint(0, 9)))
        first, second = ("".join(map(str, digits)) for digits in zip(*columns, strict=True))
        answer = f"{int(first) + int(second):0{NUM_DIGITS + 1}d}"
        reference = {"a": first, "b": second, "answer": answer}
        return Problem(key=f"{first}+{second}", text=f"{first}+{second}", reference=reference)

    def extract(self, example: PromptExample, completion: str) -> str | None:
        # The first and not the last: what a model writes behind its sum is not asked for.
        digits = re.search(r"\d+", completion)
        return digits[0] if digits else None
