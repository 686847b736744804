"""Countdown: reach a target from three to five numbers, each used once.

The prompt is the numbers and, last, the target: ``15,44,79,50``. The completion is one step for
each operation, ``44-15=29,79-29=50``; a single expression is accepted as well. Public problems are
those of d1 (256) and Dream (3,000).
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lit_dlm.grading import Verdict
from lit_dlm.tasks.base import PromptExample
from lit_dlm.toy.countdown_arithmetic import (
    COMPUTE,
    Step,
    check_expression,
    check_steps,
    parse_steps,
    solve,
    sums_first,
    write_expression,
    write_steps,
    write_sum_and_difference,
    write_worked,
)
from lit_dlm.toy.generated import Problem
from lit_dlm.toy.puzzles import PuzzleTask

MAX_COMPLETION_TOKENS = 31
"""Longest generated completion: every character is a token, and the end of text needs one."""

MAX_ANSWER_CHARS = 200
"""Longest answer that is parsed; a longer one is not a Countdown answer."""

_TAGGED = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.DOTALL)
_RUN = re.compile(r"[-+*/()=\d\s]+")
_BEFORE, _BEHIND = re.compile(r"[^\d(]*"), re.compile(r"[^\d)]*")
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


def canonical(numbers: Sequence[int], target: int) -> str:
    """Writes a problem as sorted numbers, an equals sign and the target."""
    return ",".join(str(n) for n in sorted(numbers)) + f"={target}"


def draw_countdown(rng: random.Random, *, counts: Sequence[int] = (3, 4)) -> Problem:
    """Draws one problem of either split by running random operations on random numbers.

    Numbers are 1 to 99, results whole and not negative, the target 10 to 100, as in the public
    sets. When only sums and differences occur, the sums come first.
    """
    while True:
        numbers = [rng.randint(1, 99) for _ in range(rng.choice(counts))]
        steps = _random_steps(numbers, rng)
        if steps is None or not 10 <= steps[-1][3] <= 100:
            continue
        target = steps[-1][3]
        steps = sums_first(numbers, steps) or steps
        text = write_steps(steps)
        if len(text) <= MAX_COMPLETION_TOKENS:
            break
    return _problem(numbers, target, text)


def _problem(numbers: Sequence[int], target: int, solution: str | None) -> Problem:
    return Problem(
        key=canonical(numbers, target),
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
        if sign in "-/" and a < b:
            a, b = b, a
        if sign == "/" and (b == 0 or a % b):
            return None
        result = a // b if sign == "/" else int(COMPUTE[sign](a, b))
        if result > 9_999:
            return None
        steps.append((a, sign, b, result))
        items.append(result)
    return steps


def read_problems(path: str | Path) -> list[tuple[list[int], int, str | None]]:
    """Numbers, target and, where there is one, the solution of each line of a JSON-lines file.

    Where a row's ``output`` is a number it is the target (d1); else the last number of ``input`` is
    the target and ``output`` a solution (Dream).
    """
    problems: list[tuple[list[int], int, str | None]] = []
    with Path(path).open(encoding="utf-8") as lines:
        for row, line in enumerate(lines):
            if not line.strip():
                continue
            record = json.loads(line)
            told, output = str(record.get("input")), str(record.get("output"))
            if not re.fullmatch(r"\d+(,\d+)+", told):
                raise ValueError(f"{path}: row {row}: expected numbers and commas, got {told!r}")
            numbers = [int(n) for n in told.split(",")]
            if output.isdigit():
                problems.append((numbers, int(output), None))
                continue
            target = numbers.pop()
            steps = parse_steps(output)
            wrong = check_steps(steps, numbers, target) if steps else "not a list of steps"
            if wrong:
                raise ValueError(f"{path}: row {row}: solution {output!r}: {wrong}")
            problems.append((numbers, target, output))
    return problems


def _trimmed(run: str) -> str:
    """From the first digit or opening to the last digit or closing parenthesis."""
    before, behind = _BEFORE.match(run), _BEHIND.match(run[::-1])
    assert before is not None
    assert behind is not None
    return run[before.end() : len(run) - behind.end()]


class Countdown(PuzzleTask):
    """Countdown problems from a file or generated, see the module.

    Args:
        split: ``train`` or ``test``.
        path: a file of problems (:func:`read_problems`); ``None`` generates them.
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
        if not counts or not all(2 <= count <= 5 for count in counts):
            raise ValueError(f"countdown.counts: expected numbers from 2 to 5, got {counts}")
        self.counts = tuple(counts)
        self.style = style
        super().__init__(split, path, **options)

    def draw(self, rng: random.Random) -> Problem:
        return draw_countdown(rng, counts=self.counts)

    def read(self, path: str | Path) -> list[Problem]:
        return [_problem(*fields) for fields in read_problems(path)]

    def draw_pair(self, rng: random.Random) -> tuple[str, str]:
        problem = self.draw_training(rng)
        steps = parse_steps(problem.reference["solution"])
        assert steps is not None
        if self.style == "steps":
            return problem.text, write_steps([_swapped(step, rng) for step in steps])
        write = write_worked if self.style == "worked" else write_expression
        return problem.text, write(problem.reference["numbers"], steps)

    def draw_drill(self, rng: random.Random) -> str:
        if self.style == "worked":
            pairs = [(rng.randint(1, 99), rng.randint(1, 99)) for _ in range(3)]
            return ",".join(write_sum_and_difference(*pair) for pair in pairs)
        steps: list[Step] = []
        while len(steps) < 4:
            sign = rng.choices("+-*/", weights=(7, 9, 2, 2))[0]
            a, b = rng.randint(1, 99), rng.randint(1, 99)
            if sign == "-":
                a += rng.choice((0, 0, 0, 99))
                a, b = max(a, b), min(a, b)
            elif sign == "*":
                b = rng.randint(1, 9)
            elif sign == "/":
                b = rng.randint(1, 12)
                a *= b
            result = a // b if sign == "/" else int(COMPUTE[sign](a, b))
            steps.append(_swapped((a, sign, b, result), rng))
        return write_steps(steps)

    def reference_completion(self, example: PromptExample) -> str:
        reference = example.reference
        if reference.get("solution"):
            return str(reference["solution"])
        steps = solve(reference["numbers"], reference["target"])
        if steps is None:
            raise ValueError(f"{example.uid}: no solution uses every number")
        return write_steps(steps)

    def extract(self, example: PromptExample, completion: str) -> str | None:
        """The last computations in a row, without spaces and joined by commas.

        Inside the last ``<answer>`` tags when there are any. They stand one a line or between
        commas; words around them are ignored, a line or part without one ends the search.
        """
        tagged = _TAGGED.findall(completion)
        text = tagged[-1] if tagged else completion
        for written, sign in _SIGNS.items():
            text = text.replace(written, sign)
        parts = [part for part in re.split(r"[,;\n]+", text) if part.strip()]
        kept: list[str] = []
        for part in reversed(parts):
            runs = [run for run in map(_trimmed, _RUN.findall(part)) if re.search(r"[-+*/]", run)]
            if runs:
                kept.append(re.sub(r"\s", "", runs[-1]))
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
        steps = parse_steps(answer)
        if steps is not None and len(steps) > 1:
            wrong = check_steps(steps, numbers, target)
        else:
            wrong = check_expression(answer.rsplit(",", 1)[-1], numbers, target)
        return Verdict(status="wrong" if wrong else "right", answer=answer, detail=wrong)


def _swapped(step: Step, rng: random.Random) -> Step:
    a, sign, b, result = step
    if sign in "+*" and rng.random() < 0.5:
        return (b, sign, a, result)
    return step
