"""Sums of two long numbers: where the order of decoding decides.

Both numbers and the sum have a fixed width, so ``0483+0917`` is answered by ``01400``. A digit of
the sum needs the carry from its right. Where the digits of a column add up to nine the carry only
passes through, so a run of such columns hides it from everything to the left: written from the
right each digit is easy, written in another order some are a guess. Decoding by confidence is
reported to fail on such carries (arXiv 2605.29123).
"""

from __future__ import annotations

import random
import re

from lit_dlm.grading import Verdict
from lit_dlm.tasks.base import PromptExample
from lit_dlm.toy.generated import GeneratedTask, Problem, grade_exactly

_ANSWER = re.compile(r"\d+")


def draw_addition(rng: random.Random, *, num_digits: int, nine_share: float) -> Problem:
    """Draws one sum of either split; its reference holds ``a``, ``b`` and ``answer``.

    Args:
        rng: the generator that decides everything.
        num_digits: width of both numbers; the answer has one digit more.
        nine_share: chance of a column to add up to nine; one in ten would by itself.
    """
    columns = []
    for _ in range(num_digits):
        a = rng.randint(0, 9)
        columns.append((a, 9 - a if rng.random() < nine_share else rng.randint(0, 9)))
    first, second = ("".join(str(column[row]) for column in columns) for row in (0, 1))
    total = int(first) + int(second)
    return Problem(
        key=f"{first}+{second}",
        text=f"{first}+{second}",
        reference={"a": first, "b": second, "answer": f"{total:0{num_digits + 1}d}"},
    )


class Addition(GeneratedTask):
    """Generated sums, see the module; other options as for any :class:`GeneratedTask`.

    Args:
        num_digits: width of both numbers; the sum has one digit more.
        nine_share: chance of a column to add up to nine, which makes long carries.
    """

    name = "addition"

    def __init__(
        self,
        split: str = "test",
        num_examples: int = 500,
        seed: int = 0,
        *,
        num_digits: int = 8,
        nine_share: float = 0.4,
        template: str | None = None,
    ) -> None:
        if num_digits < 1:
            raise ValueError(f"addition.num_digits: expected at least 1, got {num_digits}")
        if not 0.0 <= nine_share <= 1.0:
            raise ValueError(f"addition.nine_share: expected 0..1, got {nine_share}")
        super().__init__(split, num_examples, seed, template=template)
        self.num_digits = num_digits
        self.nine_share = nine_share

    def draw(self, rng: random.Random) -> Problem:
        """Draws a problem of either split."""
        return draw_addition(rng, num_digits=self.num_digits, nine_share=self.nine_share)

    def draw_pair(self, rng: random.Random) -> tuple[str, str]:
        """Draws a training problem and its sum."""
        problem = self.draw_training(rng)
        return problem.text, str(problem.reference["answer"])

    def reference_completion(self, example: PromptExample) -> str:
        """The sum, with leading zeros."""
        return str(example.reference["answer"])

    def extract(self, example: PromptExample, completion: str) -> str | None:
        """Finds the first run of digits."""
        found = _ANSWER.search(completion)
        return found[0] if found else None

    def grade(self, example: PromptExample, completion: str) -> Verdict:
        """Right if every digit is, leading zeros included."""
        answer = self.extract(example, completion)
        return grade_exactly(
            answer, example.reference["answer"], missing="no digit in the completion"
        )
