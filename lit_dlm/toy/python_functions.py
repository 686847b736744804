"""Tiny Python functions, graded like HumanEval: the completion is executed against a ``check``.

There are two kinds. List functions fold a list: ``Write f(xs): sum squares of xs above 3.`` Chains
apply two or three operations: ``Write f(x,y): start with x, add 3, times y, minus 2.`` Numbers have
one digit, or in :class:`WideFunctions` up to two.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from lit_dlm.grading import Verdict, run_python_check
from lit_dlm.tasks.base import PromptExample
from lit_dlm.toy.generated import GeneratedTask, Problem, tenth_of

# How prompts and programs express which elements count, and what is computed from each.
_TESTS = {
    "even": ("even xs", "{x}%2==0"),
    "odd": ("odd xs", "{x}%2==1"),
    "positive": ("positive xs", "{x}>0"),
    "negative": ("negative xs", "{x}<0"),
    "above": ("xs above {bound}", "{x}>{bound}"),
    "below": ("xs below {bound}", "{x}<{bound}"),
    "divisible": ("xs divisible by {bound}", "{x}%{bound}==0"),
}
_VALUES = {
    "value": ("values", "{x}"),
    "square": ("squares", "{x}*{x}"),
    "plus": ("values plus {amount}", "{x}+{amount}"),
    "minus": ("values minus {amount}", "{x}-{amount}"),
    "times": ("values times {amount}", "{x}*{amount}"),
}
_VERBS = {"+": "add", "-": "minus", "*": "times"}


def _with_numbers(table: dict[str, tuple[str, str]], field: str) -> list[tuple[str, int]]:
    """Lists the tests or values with every number they may have; 0 stands for none."""
    return [
        (name, number)
        for name, (text, _) in table.items()
        for number in (range(3, 100) if f"{{{field}}}" in text else (0,))
    ]


# Of WideFunctions. No bound is below 3: some would say "positive" or "even" in other words.
_WIDE_TESTS = _with_numbers(_TESTS, "bound")
_WIDE_VALUES = _with_numbers(_VALUES, "amount")
_WIDE_OPERANDS = ("x", "y", *map(str, range(3, 100)))


def _draw_list_spec(rng: random.Random) -> dict[str, Any]:
    test = rng.choice((*_TESTS,))
    # Bounds that would say "positive", "negative" or "even" in other words are left out.
    bound = {"above": rng.randint(1, 9), "below": rng.randint(1, 9), "divisible": rng.randint(3, 9)}
    # Counting ignores the value, so it has few distinct problems and gets a smaller share.
    fold = rng.choice(("sum",) * 4 + ("list",) * 4 + ("count",))
    value, amount = "value", 0
    if fold != "count":
        value = rng.choice((*_VALUES,))
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


def write_prompt(spec: dict[str, Any]) -> str:
    """Writes the user turn of a function: one sentence."""
    if spec["kind"] == "chain":
        steps = "".join(f", {_VERBS[sign]} {operand}" for sign, operand in spec["operations"])
        return f"Write f(x,y): start with {spec['start']}{steps}."
    elements, values = _TESTS[spec["test"]][0], _VALUES[spec["value"]][0]
    fold = "count" if spec["fold"] == "count" else f"{spec['fold']} {values} of"
    return f"Write f(xs): {fold} {elements}.".format_map(spec)


def evaluate(spec: dict[str, Any], *arguments: Any) -> Any:
    """Returns what the function must return for ``xs`` or ``x, y``."""
    if spec["kind"] == "chain":
        names = dict(zip("xy", arguments, strict=True))
        total = names[spec["start"]]
        for operator, operand in spec["operations"]:
            number = names[operand] if operand in names else int(operand)
            total = {"+": total + number, "-": total - number, "*": total * number}[operator]
        return total
    (xs,) = arguments
    test, value = (_compiled(table[1].format(x="x", **spec)) for table in _chosen(spec))
    kept = [value(x) for x in xs if test(x)]
    return {"sum": sum(kept), "list": kept, "count": len(kept)}[spec["fold"]]


def _chosen(spec: dict[str, Any]) -> tuple[tuple[str, str], tuple[str, str]]:
    return _TESTS[spec["test"]], _VALUES[spec["value"]]


@cache
def _compiled(expression: str) -> Callable[[int], int]:
    """Makes a function of an expression from the tables above; nothing else ever gets here."""
    function: Callable[[int], int] = eval(f"lambda x: {expression}")
    return function


def write_check(spec: dict[str, Any], *, seed: str) -> str:
    """Writes ``check(candidate)`` as HumanEval has it; ``seed`` decides the random arguments."""
    rng = random.Random(seed)
    calls: list[tuple[Any, ...]]
    if spec["kind"] == "chain":
        # Both signs and a zero; drawn ones tell apart what happens to agree on these.
        calls = [(0, 0), (1, 2), (-3, 5)]
        calls += [(rng.randint(-9, 9), rng.randint(-9, 9)) for _ in range(3)]
    else:
        bound = spec["bound"]
        # Where "above 3" and "from 3 on" differ, and a multiple of what must divide.
        around = [bound - 1, bound, bound + 1, 2 * bound]
        calls = [([],), (list(range(-4, 5)),), (around,)]
        calls += [([rng.randint(-20, 20) for _ in range(8)],) for _ in range(2)]
        if bound > 9:  # shows the divisors of a bound of two digits
            calls.append(([*range(-bound, bound)],))
    lines = ["def check(candidate):"]
    for arguments in calls:
        call = f"candidate({', '.join(map(repr, arguments))})"
        lines.append(f"    assert {call} == {evaluate(spec, *arguments)!r}")
    return "\n".join(lines) + "\n"


def write_function(spec: dict[str, Any], rng: random.Random) -> str:
    """Writes a right function ``f`` in a random style."""
    if spec["kind"] == "chain":
        return _write_chain(spec, rng)
    x = rng.choice("xvn")
    test, value = (table[1].format(x=x, **spec) for table in _chosen(spec))
    is_list = spec["fold"] == "list"
    if spec["fold"] == "count":
        value = "1"
    if rng.random() < 0.5:
        inner = f"{value} for {x} in xs if {test}"
        return f"def f(xs):\n    return {f'[{inner}]' if is_list else f'sum({inner})'}"
    t = rng.choice("trz")
    empty, added = ("[]", f"[{value}]") if is_list else ("0", value)
    return (
        f"def f(xs):\n    {t}={empty}\n    for {x} in xs:\n        if {test}:\n"
        f"            {t}+={added}\n    return {t}"
    )


def _write_chain(spec: dict[str, Any], rng: random.Random) -> str:
    operations = spec["operations"]
    if rng.random() < 0.5:
        return f"def f(x,y):\n    return {_expression(spec['start'], operations)}"
    cut = rng.randint(1, len(operations) - 1)
    t = rng.choice("trz")
    first = _expression(spec["start"], operations[:cut])
    return f"def f(x,y):\n    {t}={first}\n    return {_expression(t, operations[cut:])}"


def _expression(start: str, operations: Sequence[Sequence[str]]) -> str:
    text, is_sum = start, False
    for operator, operand in operations:
        # Without brackets the product would bind its last summand alone.
        if operator == "*" and is_sum:
            text = f"({text})"
        text += operator + operand
        is_sum = operator != "*"
    return text


def _problem(spec: dict[str, Any], stratum: str = "") -> Problem:
    # The key is the seed of the check, which is then the same wherever the problem is drawn.
    key = repr(sorted(spec.items()))
    reference = {"spec": spec, "entry_point": "f", "check": write_check(spec, seed=key)}
    return Problem(key=key, text=write_prompt(spec), reference=reference, stratum=stratum)


class PythonFunctions(GeneratedTask):
    """Generated Python functions, see the module.

    A reference holds the description ``spec``, ``entry_point`` and ``check``.

    Args:
        split: ``train`` or ``test``.
        allow_code_execution: must be true to grade, which runs model-written code in the sandbox.
    """

    name = "python_functions"
    runs_code = True

    def __init__(
        self, split: str = "test", *, allow_code_execution: bool = False, **options: Any
    ) -> None:
        super().__init__(split, **options)
        self.allow_code_execution = allow_code_execution

    def draw(self, rng: random.Random) -> Problem:
        return _problem(_draw_list_spec(rng) if rng.random() < 0.5 else _draw_chain_spec(rng))

    def write_answer(self, reference: dict[str, Any], rng: random.Random) -> str:
        return write_function(reference["spec"], rng)

    def extract(self, example: PromptExample, completion: str) -> str | None:
        return completion if f"def {example.reference['entry_point']}(" in completion else None

    def grade(self, example: PromptExample, completion: str) -> Verdict:
        code = self.extract(example, completion)
        if code is None:
            return Verdict(status="no_answer", detail="the function is not defined")
        check, name = example.reference["check"], example.reference["entry_point"]
        return run_python_check(code, check, name, allow_code_execution=self.allow_code_execution)


class WideFunctions(PythonFunctions):
    """Functions with numbers of up to two digits, which have 34,000 test problems in equal strata.

    In a stratum all functions are equally likely, so that lists of any length are made alike, and
    nothing counts, which would leave 30 test problems. A tenth is the split ``validation``. Equal
    functions have equal keys in both classes: neither trains on what the other one tests.
    """

    name = "wide_functions"
    splits = ("train", "validation", "test")
    strata = ("sum", "list", "chain of 2", "chain of 3")

    def draw(self, rng: random.Random) -> Problem:
        stratum = rng.choice(self.strata)
        spec: dict[str, Any]
        if stratum.startswith("chain"):
            operations = [
                [rng.choice("+-*"), rng.choice(_WIDE_OPERANDS)] for _ in range(int(stratum[-1]))
            ]
            spec = {"kind": "chain", "start": rng.choice("xy"), "operations": operations}
        else:
            (test, bound), (value, amount) = rng.choice(_WIDE_TESTS), rng.choice(_WIDE_VALUES)
            spec = {"kind": "list", "fold": stratum, "value": value, "amount": amount}
            spec |= {"test": test, "bound": bound}
        return _problem(spec, stratum)

    def is_of_split(self, problem: Problem, split: str) -> bool:
        return {0: "test", 1: "validation"}.get(tenth_of(problem.key), "train") == split
