"""Sums of two long numbers: where the order of decoding decides.

Both numbers and the sum have a fixed width, so ``0483+0917`` is answered by ``01400``. Where the
digits of a column add up to nine the carry only passes through, so a run of such columns hides it
from everything to the left: written from the right each digit is easy, in another order some are a
guess. Decoding by confidence is reported to fail on such carries (arXiv 2605.29123).
"""

from __future__ import annotations

import random
import re

from lit_dlm.tasks.base import PromptExample
from lit_dlm.toy.generated import GeneratedTask, Problem

NUM_DIGITS = 8
"""Of both numbers; the sum has one more."""
NINE_SHARE = 0.4
"""Chance of a column to add up to nine on purpose; one in ten would by itself."""

_ANSWER = re.compile(r"\d+")


class Addition(GeneratedTask):
    """Generated sums, see the module; a reference holds ``a``, ``b`` and ``answer``."""

    name = "addition"
    missing = "no digit in the completion"

    def draw(self, rng: random.Random) -> Problem:
        columns = []
        for _ in range(NUM_DIGITS):
            a = rng.randint(0, 9)
            columns.append((a, 9 - a if rng.random() < NINE_SHARE else rng.randint(0, 9)))
        first, second = ("".join(str(column[row]) for column in columns) for row in (0, 1))
        total = int(first) + int(second)
        return Problem(
            key=f"{first}+{second}",
            text=f"{first}+{second}",
            reference={"a": first, "b": second, "answer": f"{total:0{NUM_DIGITS + 1}d}"},
        )

    def draw_pair(self, rng: random.Random) -> tuple[str, str]:
        problem = self.draw_training(rng)
        return problem.text, str(problem.reference["answer"])

    def reference_completion(self, example: PromptExample) -> str:
        return str(example.reference["answer"])

    def extract(self, example: PromptExample, completion: str) -> str | None:
        found = _ANSWER.search(completion)
        return found[0] if found else None
