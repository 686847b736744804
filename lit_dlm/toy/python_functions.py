"""Tiny Python functions, graded like HumanEval: the completion is executed against a ``check``.

Two kinds. List functions fold a list: ``Write f(xs): sum squares of xs above 3.`` Chains apply two
or three operations: ``Write f(x,y): start with x, add 3, times y, minus 2.``
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from lit_dlm.grading import Verdict, run_python_check
from lit_dlm.tasks.base import PromptExample
from lit_dlm.toy.generated import GeneratedTask, Problem

LOOP_VARIABLES = ("x", "v", "n")
TEMPORARIES = ("t", "r", "z")

_VERBS = {"+": "add", "-": "minus", "*": "times"}


def _draw_list_spec(rng: random.Random) -> dict[str, Any]:
    test = rng.choice(("even", "odd", "positive", "negative", "above", "below", "divisible"))
    # Bounds that would say "positive", "negative" or "even" in other words are left out.
    bound = {"above": rng.randint(1, 9), "below": rng.randint(1, 9), "divisible": rng.randint(3, 9)}
    # Counting ignores the value, so it has few distinct problems and gets a smaller share.
    fold = rng.choice(("sum",) * 4 + ("list",) * 4 + ("count",))
    value, amount = "value", 0
    if fold != "count":
        value = rng.choice(("value", "square", "plus", "minus", "times"))
        if value in ("plus", "minus", "times"):
            amount = rng.randint(2 if value == "times" else 1, 9)
    return {
        "kind": "list",
        "fold": fold,
        "value": value,
        "amount": amount,
        "test": test,
        "bound": bound.get(test, 0),
    }


def _draw_chain_spec(rng: random.Random) -> dict[str, Any]:
    start = rng.choice("xy")
    operations = []
    for _ in range(rng.randint(2, 3)):
        operator = rng.choice("+-*")
        operand = rng.choice("xy") if rng.random() < 0.4 else str(rng.randint(2, 9))
        operations.append([operator, operand])
    return {"kind": "chain", "start": start, "operations": operations}


def describe(spec: dict[str, Any]) -> str:
    """Writes the user turn of a function: one sentence."""
    if spec["kind"] == "chain":
        told = ", ".join(
            f"{_VERBS[operator]} {operand}" for operator, operand in spec["operations"]
        )
        return f"Write f(x,y): start with {spec['start']}, {told}."
    value = {"value": "values", "square": "squares"}.get(
        spec["value"], f"values {spec['value']} {spec['amount']}"
    )
    test = spec["test"]
    if test in ("above", "below"):
        elements = f"xs {test} {spec['bound']}"
    elif test == "divisible":
        elements = f"xs divisible by {spec['bound']}"
    else:
        elements = f"{test} xs"
    told = (
        f"count {elements}" if spec["fold"] == "count" else f"{spec['fold']} {value} of {elements}"
    )
    return f"Write f(xs): {told}."


def evaluate(spec: dict[str, Any], *arguments: Any) -> Any:
    """What the function must return for ``xs`` or ``x, y``, without running generated code."""
    if spec["kind"] == "chain":
        names = dict(zip("xy", arguments, strict=True))
        total = names[spec["start"]]
        for operator, operand in spec["operations"]:
            number = names[operand] if operand in names else int(operand)
            total = {"+": total + number, "-": total - number, "*": total * number}[operator]
        return total
    bound, amount = spec["bound"], spec["amount"]
    passes = {
        "even": lambda x: x % 2 == 0,
        "odd": lambda x: x % 2 == 1,
        "positive": lambda x: x > 0,
        "negative": lambda x: x < 0,
        "above": lambda x: x > bound,
        "below": lambda x: x < bound,
        "divisible": lambda x: x % bound == 0,
    }[spec["test"]]
    change = {
        "value": lambda x: x,
        "square": lambda x: x * x,
        "plus": lambda x: x + amount,
        "minus": lambda x: x - amount,
        "times": lambda x: x * amount,
    }[spec["value"]]
    (xs,) = arguments
    kept = [change(x) for x in xs if passes(x)]
    return {"sum": sum(kept), "list": kept, "count": len(kept)}[spec["fold"]]


def write_check(spec: dict[str, Any], *, seed: str) -> str:
    """Writes ``check(candidate)`` in HumanEval's form, which asserts what a function returns.

    The arguments include the values around the bound, zero, negatives and an empty list; ``seed``
    decides the random ones.
    """
    rng = random.Random(seed)
    calls: list[tuple[Any, ...]]
    if spec["kind"] == "chain":
        calls = [(0, 0), (1, 2), (-3, 5)]
        calls += [(rng.randint(-9, 9), rng.randint(-9, 9)) for _ in range(3)]
    else:
        bound = spec["bound"]
        around = [bound - 1, bound, bound + 1, 2 * bound]
        calls = [([],), (list(range(-4, 5)),), (around,)]
        calls += [([rng.randint(-20, 20) for _ in range(8)],) for _ in range(2)]
    lines = ["def check(candidate):"]
    for arguments in calls:
        told = ", ".join(repr(a) for a in arguments)
        lines.append(f"    assert candidate({told}) == {evaluate(spec, *arguments)!r}")
    return "\n".join(lines) + "\n"


def write_function(spec: dict[str, Any], rng: random.Random) -> str:
    """Writes a right function ``f`` in a random style.

    The free choices are: comprehension or loop, one expression or a temporary, and the names of
    the loop variable and of the temporary.
    """
    if spec["kind"] == "chain":
        return _write_chain(spec, rng)
    x = rng.choice(LOOP_VARIABLES)
    test = {
        "even": f"{x}%2==0",
        "odd": f"{x}%2==1",
        "positive": f"{x}>0",
        "negative": f"{x}<0",
        "above": f"{x}>{spec['bound']}",
        "below": f"{x}<{spec['bound']}",
        "divisible": f"{x}%{spec['bound']}==0",
    }[spec["test"]]
    value = {
        "value": x,
        "square": f"{x}*{x}",
        "plus": f"{x}+{spec['amount']}",
        "minus": f"{x}-{spec['amount']}",
        "times": f"{x}*{spec['amount']}",
    }[spec["value"]]
    fold = spec["fold"]
    if fold == "count":
        value = "1"
    if rng.random() < 0.5:
        inner = f"{value} for {x} in xs if {test}"
        body = f"[{inner}]" if fold == "list" else f"sum({inner})"
        return f"def f(xs):\n    return {body}"
    t = rng.choice(TEMPORARIES)
    empty, added = ("[]", f"[{value}]") if fold == "list" else ("0", value)
    return (
        f"def f(xs):\n    {t}={empty}\n    for {x} in xs:\n        if {test}:\n"
        f"            {t}+={added}\n    return {t}"
    )


def _write_chain(spec: dict[str, Any], rng: random.Random) -> str:
    operations = spec["operations"]
    if rng.random() < 0.5:
        return f"def f(x,y):\n    return {_expression(spec['start'], operations)}"
    cut = rng.randint(1, len(operations) - 1)
    t = rng.choice(TEMPORARIES)
    first = _expression(spec["start"], operations[:cut])
    second = _expression(t, operations[cut:])
    return f"def f(x,y):\n    {t}={first}\n    return {second}"


def _expression(start: str, operations: Sequence[Sequence[str]]) -> str:
    """Writes operations as one expression, with parentheses only where they are needed."""
    text, is_sum = start, False
    for operator, operand in operations:
        if operator == "*" and is_sum:
            text = f"({text})"
        text += operator + operand
        is_sum = operator != "*"
    return text


class PythonFunctions(GeneratedTask):
    """Generated Python functions, see the module.

    A reference holds the description ``spec``, ``entry_point`` and ``check``.

    Args:
        split: ``train`` or ``test``.
        allow_code_execution: must be true to grade: it runs model-written code in the sandbox.
    """

    name = "python_functions"
    runs_code = True

    def __init__(
        self, split: str = "test", *, allow_code_execution: bool = False, **options: Any
    ) -> None:
        super().__init__(split, **options)
        self.allow_code_execution = allow_code_execution

    def draw(self, rng: random.Random) -> Problem:
        spec = _draw_list_spec(rng) if rng.random() < 0.5 else _draw_chain_spec(rng)
        key = repr(sorted(spec.items()))
        return Problem(
            key=key,
            text=describe(spec),
            reference={"spec": spec, "entry_point": "f", "check": write_check(spec, seed=key)},
        )

    def draw_pair(self, rng: random.Random) -> tuple[str, str]:
        problem = self.draw_training(rng)
        return problem.text, write_function(problem.reference["spec"], rng)

    def reference_completion(self, example: PromptExample) -> str:
        """Writes a right function; its style follows from the uid."""
        return write_function(example.reference["spec"], random.Random(example.uid))

    def extract(self, example: PromptExample, completion: str) -> str | None:
        return completion if f"def {example.reference['entry_point']}(" in completion else None

    def grade(self, example: PromptExample, completion: str) -> Verdict:
        code = self.extract(example, completion)
        if code is None:
            return Verdict(status="no_answer", detail="the function is not defined")
        return run_python_check(
            code,
            example.reference["check"],
            example.reference["entry_point"],
            allow_code_execution=self.allow_code_execution,
        )
