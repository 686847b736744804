"""Arithmetic of Countdown: steps and expressions, written, parsed and checked exactly."""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

# Exact, as whole numbers and fractions: with floats 8/3*3 might miss 8.
COMPUTE: dict[str, Callable[..., Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": Fraction,
}
_NODES: dict[type, str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_STEP = re.compile(r"(-?\d+)([-+*/])(-?\d+)=(-?\d+)")

Step = tuple[int, str, int, int]  # (a, op, b, result)


def whole_result(a: int, sign: str, b: int) -> int | None:
    """Returns the result of an operation if it is whole, else ``None``."""
    if sign == "/":
        return None if b == 0 or a % b else a // b
    return int(COMPUTE[sign](a, b))


def _removed(parts: list[tuple[Any, ...]], value: int) -> tuple[Any, ...]:
    # The first of equal values: a number may be there twice, or be the result of a step as well.
    return parts.pop(next(i for i, part in enumerate(parts) if part[0] == value))


def _signs(numbers: Sequence[int], steps: Sequence[Step]) -> list[tuple[int, int]] | None:
    """Returns the numbers with their signs in a sum, in order; ``None`` for other operations."""
    if any(sign in "*/" for _, sign, _, _ in steps):
        return None
    # The value of a part, and the indices of its numbers with their signs.
    parts: list[tuple[Any, ...]] = [(n, [(index, 1)]) for index, n in enumerate(numbers)]
    for a, sign, b, result in steps:
        (_, left), (_, right) = _removed(parts, a), _removed(parts, b)
        factor = 1 if sign == "+" else -1
        parts.append((result, left + [(index, one * factor) for index, one in right]))
    return [(numbers[index], sign) for index, sign in sorted(parts[0][1])]


def sums_first(numbers: Sequence[int], steps: Sequence[Step]) -> list[Step] | None:
    """Writes sums and differences as all sums, then all differences; ``None`` for other steps."""
    signs = _signs(numbers, steps)
    if signs is None:
        return None
    added, taken = ([n for n, sign in signs if sign == wanted] for wanted in (1, -1))
    chain: list[Step] = []
    total = added[0]
    for sign, numbers in (("+", added[1:]), ("-", taken)):
        for n in numbers:
            chain.append((total, sign, n, int(COMPUTE[sign](total, n))))
            total = chain[-1][3]
    return chain


def write_expression(numbers: Sequence[int], steps: Sequence[Step]) -> str:
    """Writes steps as one expression, followed by its value: ``79-44+15=50``.

    With sums and differences only, the numbers keep their order after the first one that is added,
    so that only the signs have to be found.
    """
    target = steps[-1][3]
    signs = _signs(numbers, steps)
    if signs is not None:
        # A sign in front of the first number would be one more form to learn.
        first = next(i for i, (_, sign) in enumerate(signs) if sign > 0)
        ordered = [signs[first], *signs[:first], *signs[first + 1 :]]
        text = "".join(f"{'+' if sign > 0 else '-'}{n}" for n, sign in ordered)
        return f"{text[1:]}={target}"
    # Value, text and loosest operation of every part that is not used yet.
    parts: list[tuple[Any, ...]] = [(n, str(n), "") for n in numbers]
    for a, sign, b, result in steps:
        (_, left, inner_left), (_, right, inner_right) = _removed(parts, a), _removed(parts, b)
        if sign in "*/" and inner_left in ("+", "-"):
            left = f"({left})"
        if inner_right and sign != "+" and (sign != "-" or inner_right in "+-"):
            right = f"({right})"
        parts.append((result, f"{left}{sign}{right}", sign))
    return f"{parts[0][1]}={target}"


def write_worked(numbers: Sequence[int], steps: Sequence[Step]) -> str:
    """Writes what decides the signs first: ``05+44=049,44-05=39,42+81=123,81-42=39,5-44+81=42``.

    First come sum and difference of the first two of three numbers, then those of the target and
    the third. Wherever signs alone lead to the target, one of the first pair equals one of the
    second: the search is four sums and a comparison. With other counts, only the expression is
    written.
    """
    expression = write_expression(numbers, steps)
    if len(numbers) != 3:
        return expression
    pairs = (numbers[0], numbers[1]), (steps[-1][3], numbers[2])
    return ",".join([write_sum_and_difference(*pair) for pair in pairs] + [expression])


def write_sum_and_difference(a: int, b: int) -> str:
    """Writes ``05+44=049,44-05=39``: each digit of numbers up to 99 has a fixed place."""
    low, high = sorted((a, b))
    return f"{a:02}+{b:02}={a + b:03},{high:02}-{low:02}={high - low:02}"


def write_steps(steps: Sequence[Step]) -> str:
    """Writes steps as ``a<op>b=c``, joined by commas."""
    return ",".join(f"{a}{sign}{b}={result}" for a, sign, b, result in steps)


def parse_steps(answer: str) -> list[Step]:
    """Parses an answer without spaces as steps; returns none if any part is not a step."""
    matches = [_STEP.fullmatch(part) for part in re.split(r"[,;\n]+", answer) if part]
    steps = [(int(m[1]), m[2], int(m[3]), int(m[4])) for m in matches if m]
    return steps if len(steps) == len(matches) else []


def check_steps(steps: Sequence[Step], numbers: Sequence[int], target: int) -> str:
    """Says in one line what is wrong with steps that should use each number; empty if nothing."""
    # Results go back into the pool, where they are as good as given numbers, each for one use.
    pool = Counter(numbers)
    for a, sign, b, result in steps:
        for operand in (a, b):
            if pool[operand] == 0:
                return f"{operand} is not available"
            pool[operand] -= 1
        if (sign == "/" and b == 0) or COMPUTE[sign](a, b) != result:
            return f"{a}{sign}{b} is not {result}"
        pool[result] += 1
    if steps[-1][3] != target:
        return f"ends at {steps[-1][3]}, not at {target}"
    if sum(pool.values()) != 1:
        return "not every number is used"
    return ""


def check_expression(answer: str, numbers: Sequence[int], target: int) -> str:
    """Says what is wrong with an expression, perhaps with the target behind it, as for steps."""
    expression, equals, claimed = answer.partition("=")
    if equals and claimed != str(target):
        return f"claims {claimed}, not {target}"
    used: Counter[int] = Counter()
    # Parsed and walked, never evaluated: model-written text does not run, and 9**9**9 has no node.
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
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used[node.value] += 1
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand, used)
    if isinstance(node, ast.BinOp) and type(node.op) in _NODES:
        left, right = _evaluate(node.left, used), _evaluate(node.right, used)
        sign = _NODES[type(node.op)]
        return left / right if sign == "/" else Fraction(COMPUTE[sign](left, right))
    raise ValueError("not an expression of whole numbers and + - * /")
