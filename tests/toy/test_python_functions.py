"""Python functions: every style runs right, and the checks catch near misses."""

import random
from typing import Any

import pytest

from lit_dlm.tasks.base import PromptExample
from lit_dlm.toy.python_functions import (
    PythonFunctions,
    evaluate,
    write_check,
    write_function,
    write_prompt,
)

ABOVE = {"kind": "list", "fold": "sum", "value": "square", "amount": 0, "test": "above", "bound": 3}
CHAIN = {"kind": "chain", "start": "x", "operations": [["+", "3"], ["*", "y"], ["-", "2"]]}


def passes(code: str, check: str) -> bool:
    """Runs our own generated code in process; model-written code only ever runs in the sandbox."""
    names: dict[str, Any] = {}
    exec(code + "\n" + check, names)
    try:
        names["check"](names["f"])
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize(
    ("spec", "arguments", "result"),
    [
        (CHAIN, [1, 2], 6),  # (1 + 3) * 2 - 2
        (ABOVE, [[3, 4, 5]], 41),  # squares of 4 and 5
        (ABOVE | {"test": "below", "value": "plus", "amount": 2}, [[-1, 2, 3]], 5),  # 1 + 4
        (ABOVE | {"test": "even", "value": "value", "fold": "list"}, [[-2, 0, 3]], [-2, 0]),
        (ABOVE | {"test": "odd", "value": "times", "amount": 3}, [[-3, 2, 7]], 12),  # -9 + 21
        (ABOVE | {"test": "positive", "value": "minus", "amount": 1}, [[-1, 0, 1, 5]], 4),
        (ABOVE | {"test": "negative", "value": "value", "fold": "count"}, [[-1, 0, -7]], 2),
        (ABOVE | {"test": "divisible", "fold": "list"}, [[-3, 0, 4, 6]], [9, 0, 36]),
    ],
)
def test_evaluate_by_hand(spec: dict[str, Any], arguments: list[Any], result: object) -> None:
    assert evaluate(spec, *arguments) == result


HEAD = "def f(x,y):\n    "
T_LOOP = "def f(xs):\n    t=0\n    for x in xs:\n        if x>3:\n            t+=x*x\n    return t"


def test_descriptions_and_styles_by_hand() -> None:
    """Three comprehensions (loop variable), nine loops (loop variable and temporary): 12.

    Of a chain one expression; a cut after the first or second operation with three names: 1 + 6.
    """
    assert write_prompt(ABOVE) == "Write f(xs): sum squares of xs above 3."
    written = {write_function(ABOVE, random.Random(seed)) for seed in range(300)}
    assert {"def f(xs):\n    return sum(v*v for v in xs if v>3)", T_LOOP} <= written
    assert len(written) == 12
    assert write_prompt(CHAIN) == "Write f(x,y): start with x, add 3, times y, minus 2."
    written = {write_function(CHAIN, random.Random(seed)) for seed in range(300)}
    assert {f"{HEAD}return (x+3)*y-2", f"{HEAD}z=x+3\n    return z*y-2"} <= written
    assert len(written) == 7


def test_every_style_passes_its_check() -> None:
    rng = random.Random(0)
    for _ in range(300):
        reference = PythonFunctions().draw(rng).reference
        assert passes(write_function(reference["spec"], rng), reference["check"])


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("v>3", "v>=3"), ("v>3", "v>4"), ("v*v", "v"), ("sum", "list"), ("v>3", "v<3")],
)
def test_a_near_miss_fails_the_check(right: str, wrong: str) -> None:
    code = "def f(xs):\n    return sum(v*v for v in xs if v>3)"
    check = write_check(ABOVE, seed="s")
    assert passes(code, check)
    assert not passes(code.replace(right, wrong), check)


def test_different_list_functions_have_different_checks() -> None:
    """A completion for one description must not pass for another one."""
    rng = random.Random(1)
    drawn = {one.key: one.reference for one in (PythonFunctions().draw(rng) for _ in range(120))}
    lists = [one for one in drawn.values() if one["spec"]["kind"] == "list"]
    functions = [write_function(one["spec"], rng) for one in lists]
    confused = [
        (one["spec"], code)
        for one, own in zip(lists, functions, strict=True)
        for code in functions
        if code is not own and passes(code, one["check"])
    ]
    assert not confused


def test_grades_in_the_sandbox_with_permission() -> None:
    reference = {"spec": CHAIN, "entry_point": "f", "check": write_check(CHAIN, seed="s")}
    example = PromptExample(uid="u", task="python_functions", text="", reference=reference)
    task, right = PythonFunctions(allow_code_execution=True), f"{HEAD}return (x+3)*y-2"
    for code, status in ((right, "right"), (f"{HEAD}return x", "wrong"), ("x+3", "no_answer")):
        assert task.grade(example, code).status == status
    with pytest.raises(ValueError, match="allow_code_execution"):
        PythonFunctions().grade(example, right)
