"""Countdown: reach a target from two to five numbers, each used once.

The prompt is the numbers and, last, the target: ``15,44,79,50``. The completion is one step for
each operation, ``44-15=29,79-29=50``; a single expression is accepted as well. Public problems are
those of d1 (256) and Dream (3,000).
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any, Literal

from lit_dlm.grading import Verdict
from lit_dlm.system.options import one_of, within
from lit_dlm.tasks.base import PromptExample
from lit_dlm.tasks.sources import Row
from lit_dlm.toy.countdown_arithmetic import (
    Step,
    check_expression,
    check_steps,
    parse_steps,
    sums_first,
    whole_result,
    write_expression,
    write_steps,
    write_sum_and_difference,
    write_worked,
)
from lit_dlm.toy.generated import Problem, PuzzleTask, tagged_answer

MAX_COMPLETION_TOKENS = 31  # every character is a token, and the end of text needs one

MAX_ANSWER_CHARS = 200  # longest answer that is parsed; a longer one is not a Countdown answer

_RUN = re.compile(r"[-+*/()=\d\s]+")
_SIGNS = {
    "\N{MULTIPLICATION SIGN}": "*",
    "\N{MIDDLE DOT}": "*",
    "\N{DIVISION SIGN}": "/",
    "\N{MINUS SIGN}": "-",
    "\N{EN DASH}": "-",
    "\\times": "*",
    "\\cdot": "*",
    "\\div": "/",
    "$": "",
}


def _problem(numbers: Sequence[int], target: int, solution: str | None) -> Problem:
    return Problem(
        key=",".join(map(str, sorted(numbers))) + f"={target}",
        text=",".join(str(n) for n in (*numbers, target)),
        reference={"numbers": list(numbers), "target": target, "solution": solution},
    )


def _random_steps(numbers: Sequence[int], rng: random.Random) -> list[Step] | None:
    """Combines random pairs until one number is left; ``None`` when a result is not allowed."""
    items = list(numbers)
    steps: list[Step] = []
    while len(items) > 1:
        a, b = (items.pop(rng.randrange(len(items))) for _ in range(2))
        sign = rng.choices("+-*/", weights=(3, 4, 2, 3))[0]
        # No result is negative or a fraction below 1.
        if sign in "-/" and a < b:
            a, b = b, a
        result = whole_result(a, sign, b)
        if result is None or result > 9_999:
            return None
        steps.append((a, sign, b, result))
        items.append(result)
    return steps


class Countdown(PuzzleTask):
    """Countdown problems from a file or generated, see the module.

    Args:
        split: ``train`` or ``test``.
        path: a file of problems (:meth:`read`); ``None`` generates them.
        counts: how many numbers a generated problem has, each with equal chance.
        style: how training solutions are written. An ``expression`` is easier for a very small
            model, which need not compute the values in between; ``worked`` puts the four sums that
            decide it before the expression (:func:`write_worked`).
    """

    name = "countdown"

    def __init__(
        self,
        split: str = "test",
        path: str | None = None,
        *,
        counts: Sequence[int] = (3, 4),
        style: Literal["steps", "expression", "worked"] = "steps",
        **options: Any,
    ) -> None:
        within("[2, 5]", of="countdown.", **{f"counts[{n}]": one for n, one in enumerate(counts)})
        self.counts = tuple(counts)
        self.style = style
        super().__init__(split, path, **options)

    def draw(self, rng: random.Random) -> Problem:
        """Runs random operations on numbers 1 to 99; the target is 10 to 100 as in public sets."""
        while True:
            numbers = [rng.randint(1, 99) for _ in range(rng.choice(self.counts))]
            steps = _random_steps(numbers, rng)
            if steps is None or not 10 <= steps[-1][3] <= 100:
                continue
            # One form for sums and differences: of the many orders of the same steps a model would
            # have to learn which one is meant.
            text = write_steps(sums_first(numbers, steps) or steps)
            if len(text) <= MAX_COMPLETION_TOKENS:
                return _problem(numbers, steps[-1][3], text)

    def read(self, row: Row) -> Problem:
        """Reads a row, whose target is a number in ``output`` (d1) or ends ``input`` (Dream)."""
        listed, output = (str(row.fields.get(name)) for name in ("input", "output"))
        row.expect(bool(re.fullmatch(r"\d+(,\d+)+", listed)), "numbers and commas", listed)
        numbers = [int(n) for n in listed.split(",")]
        if output.isdigit():
            return _problem(numbers, int(output), None)
        target, steps = numbers.pop(), parse_steps(output)
        wrong = check_steps(steps, numbers, target) if steps else "not a list of steps"
        row.expect(not wrong, "steps that lead to the target", f"{output} ({wrong})")
        return _problem(numbers, target, output)

    def draw_pair(self, rng: random.Random) -> tuple[str, str]:
        problem = self._draw_of_split(rng, "train")
        steps = parse_steps(problem.reference["solution"])
        if self.style == "steps":
            return problem.text, write_steps([_swapped(step, rng) for step in steps])
        write = write_worked if self.style == "worked" else write_expression
        return problem.text, write(problem.reference["numbers"], steps)

    def draw_drill(self, rng: random.Random) -> str:
        one_of("worked", of="drills.", style=self.style)
        pairs = [(rng.randint(1, 99), rng.randint(1, 99)) for _ in range(3)]
        return ",".join(write_sum_and_difference(*pair) for pair in pairs)

    def reference_completion(self, example: PromptExample) -> str:
        if not example.reference["solution"]:
            raise ValueError(f"{example.uid}: the row has no solution in field 'output'")
        return str(example.reference["solution"])

    def extract(self, example: PromptExample, completion: str) -> str | None:
        """Returns the last consecutive computations, in the last ``<answer>`` tags if there are."""
        text = tagged_answer(completion)
        for written, sign in _SIGNS.items():
            text = text.replace(written, sign)
        parts = [part for part in re.split(r"[,;\n]+", text) if part.strip()]
        kept: list[str] = []
        for part in reversed(parts):
            # Stripped by sets of characters: a pattern would search long runs again and again. The
            # bullets of a list go first, or "- 44" would be a negative number.
            runs = [re.sub(r"^\s*(?:\d+\)|[-*+]\s)|\s", "", run) for run in _RUN.findall(part)]
            runs = [run.lstrip("+*/=)").rstrip("-+*/=(") for run in runs]
            # Consecutive lines alone: a computation that was given up stands apart from the answer.
            if runs := [run for run in runs if re.search(r"[-+*/]", run)]:
                kept.append(runs[-1])
            elif kept:
                break
        return ",".join(reversed(kept)) or None

    def grade(self, example: PromptExample, completion: str) -> Verdict:
        answer = self.extract(example, completion)
        if answer is None:
            return Verdict(status="no_answer", detail="no computation found")
        if len(answer) > MAX_ANSWER_CHARS:
            return Verdict(status="wrong", answer=answer[:MAX_ANSWER_CHARS], detail="too long")
        numbers, target = example.reference["numbers"], example.reference["target"]
        # A single equation is an expression with its value, not a step that uses two numbers.
        steps = parse_steps(answer)
        if len(steps) > 1:
            wrong = check_steps(steps, numbers, target)
        else:
            wrong = check_expression(answer.rsplit(",", 1)[-1], numbers, target)
        return Verdict(status="wrong" if wrong else "right", answer=answer, detail=wrong)


def _swapped(step: Step, rng: random.Random) -> Step:
    a, sign, b, result = step
    if sign in "+*" and rng.random() < 0.5:
        return (b, sign, a, result)
    return step
