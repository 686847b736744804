"""Countdown: reach a target from three to five numbers, each used once.

The prompt is the numbers and, last, the target: ``15,44,79,50``. The completion is one step for
each operation, ``44-15=29,79-29=50``; a single expression is accepted as well. Training problems
never meet a test problem: the digests of all public ones (d1, 256 problems; Dream, 3,000) are
shipped next to the task.
"""

from __future__ import annotations

import ast
import json
import operator
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from lit_dlm.grading import Verdict
from lit_dlm.tasks.base import PromptExample, Task
from lit_dlm.tasks.digests import shipped_digests, short_digest
from lit_dlm.tasks.generated import Problem, check_split, draw_of_split, generated_examples

MAX_COMPLETION_TOKENS = 31
"""Longest generated completion: every character is a token, and the end of text needs one."""

MAX_ANSWER_CHARS = 200
"""Longest answer that is parsed; a longer one is not a Countdown answer."""

_COMPUTE: dict[str, Callable[..., Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": Fraction,
}
_NODES: dict[type, str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}

_TAGGED = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.DOTALL)
_RUN = re.compile(r"[\d(][-+*/()=\d\s]*[\d)]")
_STEP = re.compile(r"(-?\d+)([-+*/])(-?\d+)=(-?\d+)")
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

Step = tuple[int, str, int, int]
"""``(a, op, b, result)``."""


def canonical(numbers: Sequence[int], target: int) -> str:
    """Writes a problem so that the order of its numbers does not matter.

    Args:
        numbers: the given numbers.
        target: the number to reach.

    Returns:
        Sorted numbers, an equals sign and the target.
    """
    return ",".join(str(n) for n in sorted(numbers)) + f"={target}"


def draw_countdown(rng: random.Random, *, counts: Sequence[int] = (3, 4)) -> Problem:
    """Draws one problem of either split by running random operations on random numbers.

    Numbers are 1 to 99, results whole and not negative, the target 10 to 100, as in the public
    sets. When only sums and differences occur, the sums come first.

    Args:
        rng: the generator that decides everything.
        counts: how many numbers, each with equal chance.

    Returns:
        The problem; its reference holds ``numbers``, ``target`` and ``solution``.
    """
    while True:
        numbers = [rng.randint(1, 99) for _ in range(rng.choice(counts))]
        steps = _random_steps(numbers, rng)
        if steps is None or not 10 <= steps[-1][3] <= 100:
            continue
        target = steps[-1][3]
        steps = _sums_first(numbers, steps) or steps
        text = write_steps(steps)
        if len(text) <= MAX_COMPLETION_TOKENS:
            break
    return Problem(
        key=canonical(numbers, target),
        text=",".join(str(n) for n in (*numbers, target)),
        reference={"numbers": numbers, "target": target, "solution": text},
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
        result = a // b if sign == "/" else int(_COMPUTE[sign](a, b))
        if result > 9_999:
            return None
        steps.append((a, sign, b, result))
        items.append(result)
    return steps


def _signs(numbers: Sequence[int], steps: Sequence[Step]) -> list[tuple[int, int]] | None:
    """Follows the sign of every given number through sums and differences.

    Returns:
        Pairs of number and sign in the given order, or ``None`` when another operation occurs.
    """
    if any(sign in "*/" for _, sign, _, _ in steps):
        return None
    pool: list[tuple[int, list[tuple[int, int]]]] = [
        (number, [(index, 1)]) for index, number in enumerate(numbers)
    ]
    for a, sign, b, result in steps:
        left = pool.pop(next(i for i, (value, _) in enumerate(pool) if value == a))
        right = pool.pop(next(i for i, (value, _) in enumerate(pool) if value == b))
        factor = 1 if sign == "+" else -1
        pool.append((result, left[1] + [(index, s * factor) for index, s in right[1]]))
    return [(numbers[index], sign) for index, sign in sorted(pool[0][1])]


def _sums_first(numbers: Sequence[int], steps: Sequence[Step]) -> list[Step] | None:
    """Rewrites a chain of sums and differences as all sums, then all differences.

    Returns:
        The chain, or ``None`` when another operation occurs.
    """
    signs = _signs(numbers, steps)
    if signs is None:
        return None
    first, *added = [n for n, sign in signs if sign > 0]
    chain: list[Step] = []
    total = first
    for n in added:
        chain.append((total, "+", n, total + n))
        total += n
    for n in (n for n, sign in signs if sign < 0):
        chain.append((total, "-", n, total - n))
        total -= n
    return chain


def write_expression(numbers: Sequence[int], steps: Sequence[Step]) -> str:
    """Writes steps as one expression, followed by its value: ``79-44+15=50``.

    Sums and differences alone keep the given order of the numbers, after the first added one: then
    only the signs are to be found. Otherwise the tree of the steps is written with the parentheses
    it needs.

    Args:
        numbers: the given numbers.
        steps: steps that use them.

    Returns:
        The completion.
    """
    target = steps[-1][3]
    signs = _signs(numbers, steps)
    if signs is not None:
        first = next(i for i, (_, sign) in enumerate(signs) if sign > 0)
        ordered = [signs[first], *signs[:first], *signs[first + 1 :]]
        text = "".join(f"{'+' if sign > 0 else '-'}{n}" for n, sign in ordered)
        return f"{text[1:]}={target}"
    # Value, text and loosest operation of every part that is not used yet.
    parts = [(n, str(n), "") for n in numbers]
    for a, sign, b, result in steps:
        left = parts.pop(next(i for i, part in enumerate(parts) if part[0] == a))
        right = parts.pop(next(i for i, part in enumerate(parts) if part[0] == b))
        loose_left = sign in "*/" and left[2] in ("+", "-")
        loose_right = right[2] != "" and (sign != "+") and (sign != "-" or right[2] in "+-")
        first_text = f"({left[1]})" if loose_left else left[1]
        second_text = f"({right[1]})" if loose_right else right[1]
        parts.append((result, f"{first_text}{sign}{second_text}", sign))
    return f"{parts[0][1]}={target}"


def write_steps(steps: Sequence[Step]) -> str:
    """Writes steps as ``a<op>b=c``, joined by commas.

    Args:
        steps: the steps.

    Returns:
        The completion.
    """
    return ",".join(f"{a}{sign}{b}={result}" for a, sign, b, result in steps)


def solve(numbers: Sequence[int], target: int) -> list[Step] | None:
    """Finds one solution that uses every number, by exhaustive search.

    Args:
        numbers: up to five numbers.
        target: the number to reach.

    Returns:
        The steps, with whole and not negative results, or ``None`` when there are none.
    """
    return next(_solutions(list(numbers), target), None)


def _solutions(items: list[int], target: int) -> Iterator[list[Step]]:
    """Yields the chains that lead from the items to the target."""
    if len(items) == 1:
        if items[0] == target:
            yield []
        return
    for i in range(len(items)):
        for j in range(i):
            a, b = max(items[i], items[j]), min(items[i], items[j])
            rest = [item for k, item in enumerate(items) if k not in (i, j)]
            for sign in "+-*/":
                if sign == "/" and (b == 0 or a % b):
                    continue
                result = a // b if sign == "/" else int(_COMPUTE[sign](a, b))
                for tail in _solutions([*rest, result], target):
                    yield [(a, sign, b, result), *tail]


def parse_steps(answer: str) -> list[Step] | None:
    """Parses an answer as steps.

    Args:
        answer: text without spaces.

    Returns:
        The steps, or ``None`` when any part is not a step.
    """
    steps: list[Step] = []
    for part in filter(None, re.split(r"[,;\n]+", answer)):
        match = _STEP.fullmatch(part)
        if match is None:
            return None
        steps.append((int(match[1]), match[2], int(match[3]), int(match[4])))
    return steps or None


def check_steps(steps: Sequence[Step], numbers: Sequence[int], target: int) -> str:
    """Checks that steps lead from the numbers to the target.

    Args:
        steps: the steps.
        numbers: the given numbers; each must be used exactly once.
        target: the number to reach.

    Returns:
        What is wrong, in one line; empty when nothing is.
    """
    pool = Counter(numbers)
    for a, sign, b, result in steps:
        for operand in (a, b):
            if pool[operand] == 0:
                return f"{operand} is not available"
            pool[operand] -= 1
        if (sign == "/" and b == 0) or _COMPUTE[sign](a, b) != result:
            return f"{a}{sign}{b} is not {result}"
        pool[result] += 1
    if steps[-1][3] != target:
        return f"ends at {steps[-1][3]}, not at {target}"
    if sum(pool.values()) != 1:
        return "not every number is used"
    return ""


def check_expression(answer: str, numbers: Sequence[int], target: int) -> str:
    """Checks that one expression of the numbers equals the target.

    Args:
        answer: an expression of whole numbers, ``+ - * /`` and parentheses, perhaps followed by
            an equals sign and the target.
        numbers: the given numbers; each must be used exactly once.
        target: the number to reach.

    Returns:
        What is wrong, in one line; empty when nothing is.
    """
    expression, equals, claimed = answer.partition("=")
    if equals and claimed != str(target):
        return f"claims {claimed}, not {target}"
    used: Counter[int] = Counter()
    try:
        value = _evaluate(ast.parse(expression, mode="eval").body, used)
    except (SyntaxError, ZeroDivisionError, RecursionError) as error:
        return f"cannot be evaluated: {error}"
    except ValueError as error:
        return str(error)
    if used != Counter(numbers):
        return "the numbers are not each used once"
    return "" if value == target else f"equals {value}, not {target}"


def _evaluate(node: ast.expr, used: Counter[int]) -> Fraction:
    """Evaluates a checked expression tree exactly, and notes the numbers it uses."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used[node.value] += 1
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _NODES:
        left, right = _evaluate(node.left, used), _evaluate(node.right, used)
        sign = _NODES[type(node.op)]
        return left / right if sign == "/" else Fraction(_COMPUTE[sign](left, right))
    raise ValueError("not an expression of whole numbers and + - * /")


def read_problems(path: str | Path) -> list[tuple[list[int], int, str | None]]:
    """Reads a JSON-lines file of problems.

    Args:
        path: rows with ``input`` and ``output``. Where ``output`` is a number it is the target
            (d1); else the last number of ``input`` is the target and ``output`` a solution (Dream).

    Returns:
        Numbers, target and the solution where the file has one.

    Raises:
        ValueError: if a row does not parse or its solution is wrong; names file and row.
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


class Countdown(Task):
    """Countdown problems from a file or generated, see the module."""

    name = "countdown"
    runs_code = False

    def __init__(
        self,
        split: str = "test",
        path: str | None = None,
        *,
        limit: int | None = None,
        num_examples: int = 500,
        counts: Sequence[int] = (3, 4),
        seed: int = 0,
        style: Literal["steps", "expression"] = "steps",
        exclude_paths: Sequence[str] = (),
        instruction: str = "",
    ) -> None:
        """Sets up one split.

        Args:
            split: ``train`` or ``test``.
            path: a file of problems (see :func:`read_problems`); ``None`` generates them.
            limit: use only the first so many problems of the file.
            num_examples: how many problems to generate without a file.
            counts: how many numbers a generated problem has, each with equal chance.
            seed: seed of the generated list.
            style: how training solutions are written. An ``expression`` is easier for a very small
                model, which need not compute the values in between.
            exclude_paths: further files whose problems training must never see.
            instruction: text before the numbers, for a model that does not know the task.

        Raises:
            ValueError: if the split is unknown, a count is outside 2..5, or training is asked
                for on a file.
        """
        self.split: str = check_split(self.name, split)
        if path is not None and split == "train":
            raise ValueError(
                "countdown.path: files hold test problems; training ones are generated"
            )
        if not counts or not all(2 <= count <= 5 for count in counts):
            raise ValueError(f"countdown.counts: expected numbers from 2 to 5, got {counts}")
        self.path = path
        self.limit = limit
        self.num_examples = num_examples
        self.counts = tuple(counts)
        self.seed = seed
        self.style = style
        self.instruction = instruction
        self._excluded = shipped_digests("countdown") | {
            short_digest(canonical(numbers, target))
            for other in exclude_paths
            for numbers, target, _ in read_problems(other)
        }

    def is_excluded(self, problem: Problem) -> bool:
        """Whether a problem is one of the public test problems or of ``exclude_paths``."""
        return short_digest(problem.key) in self._excluded

    def _draw(self, rng: random.Random) -> Problem:
        """Draws a problem of either split."""
        return draw_countdown(rng, counts=self.counts)

    def examples(self) -> Sequence[PromptExample]:
        """Lists the problems."""
        if self.path is None:
            made = generated_examples(
                self._draw,
                task=self.name,
                split=check_split(self.name, self.split),
                num_examples=self.num_examples,
                seed=self.seed,
                excluded=self.is_excluded,
            )
            return [self._instructed(example) for example in made]
        stem = Path(self.path).stem
        return [
            self._instructed(
                PromptExample(
                    uid=f"{self.name}/{self.split}/{stem}-{index:05d}",
                    task=self.name,
                    text=",".join(str(n) for n in (*numbers, target)),
                    reference={"numbers": numbers, "target": target, "solution": solution},
                )
            )
            for index, (numbers, target, solution) in enumerate(
                read_problems(self.path)[: self.limit]
            )
        ]

    def _instructed(self, example: PromptExample) -> PromptExample:
        """Puts the instruction before the numbers."""
        if not self.instruction:
            return example
        text = f"{self.instruction}\n{example.text}"
        return PromptExample(
            uid=example.uid, task=example.task, text=text, reference=example.reference
        )

    def draw_pair(self, rng: random.Random) -> tuple[str, str]:
        """Draws a training problem and a solution; steps come in random operand order."""
        problem = draw_of_split(self._draw, rng, split="train", excluded=self.is_excluded)
        steps = parse_steps(problem.reference["solution"])
        assert steps is not None
        if self.style == "expression":
            return problem.text, write_expression(problem.reference["numbers"], steps)
        return problem.text, write_steps([_swapped(step, rng) for step in steps])

    def draw_drill(self, rng: random.Random) -> str:
        """Draws a line of four independent equations in the number range of the problems."""
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
            result = a // b if sign == "/" else int(_COMPUTE[sign](a, b))
            steps.append(_swapped((a, sign, b, result), rng))
        return write_steps(steps)

    def reference_completion(self, example: PromptExample) -> str:
        """Writes the listed solution, or searches for one.

        Raises:
            ValueError: if the problem has none.
        """
        reference = example.reference
        if reference.get("solution"):
            return str(reference["solution"])
        steps = solve(reference["numbers"], reference["target"])
        if steps is None:
            raise ValueError(f"{example.uid}: no solution uses every number")
        return write_steps(steps)

    def extract(self, example: PromptExample, completion: str) -> str | None:
        """Finds the answer: the last computations in a row, one a line or between commas.

        Inside the last ``<answer>`` tags when there are any, else in the whole completion. Words
        around a computation are ignored; a line or part without one ends the search.

        Returns:
            The answer without spaces, steps joined by commas, or ``None``.
        """
        tagged = _TAGGED.findall(completion)
        text = tagged[-1] if tagged else completion
        for written, sign in _SIGNS.items():
            text = text.replace(written, sign)
        parts = [part for part in re.split(r"[,;\n]+", text) if part.strip()]
        kept: list[str] = []
        for part in reversed(parts):
            runs = [run for run in _RUN.findall(part) if re.search(r"[-+*/]", run)]
            if runs:
                kept.insert(0, re.sub(r"\s", "", runs[-1]))
            elif kept:
                break
        return ",".join(kept) or None

    def grade(self, example: PromptExample, completion: str) -> Verdict:
        """Checks every step (or the expression), that each number is used once, and the target."""
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
    """Swaps the operands of a sum or product half of the time."""
    a, sign, b, result = step
    if sign in "+*" and rng.random() < 0.5:
        return (b, sign, a, result)
    return step
