"""Python functions: every style runs right, and the checks catch near misses."""

import random
from collections import Counter
from typing import Any

import pytest

from lit_dlm.tasks.base import PromptExample
from lit_dlm.toy.generated import Problem, tenth_of
from lit_dlm.toy.python_functions import (
    PythonFunctions,
    WideFunctions,
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


@pytest.mark.parametrize("task", [PythonFunctions, WideFunctions])
def test_every_style_passes_its_check(task: type[PythonFunctions]) -> None:
    rng = random.Random(0)
    for _ in range(300):
        reference = task().draw(rng).reference
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


@pytest.mark.parametrize("task", [PythonFunctions, WideFunctions])
def test_different_list_functions_have_different_checks(task: type[PythonFunctions]) -> None:
    """A completion for one description must not pass for another one."""
    rng = random.Random(1)
    drawn = {one.key: one.reference for one in (task().draw(rng) for _ in range(120))}
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


def test_a_check_tells_a_bound_of_two_digits_from_its_divisors() -> None:
    spec = ABOVE | {"fold": "count", "value": "value", "test": "divisible", "bound": 38}
    code = "def f(xs):\n    return sum(1 for x in xs if x%38==0)"
    for seed in range(20):
        check = write_check(spec, seed=str(seed))
        assert passes(code, check)
        assert not passes(code.replace("38", "19"), check)


def kind(spec: dict[str, Any]) -> str:
    return spec.get("fold") or f"chain of {len(spec['operations'])}"


def bounded(spec: dict[str, Any]) -> bool:
    return spec.get("bound", 0) > 0


@pytest.mark.parametrize("length", [300, 1_000, 3_001])
def test_lists_of_wide_functions_are_made_alike_at_any_length(length: int) -> None:
    """A quarter of each kind, the odd one a sum: 751 and three times 750.

    Of 295 tests 291 have a bound, that is 98.6 %, with a standard deviation of 1 % among 150.
    """
    specs = [one.reference["spec"] for one in WideFunctions(num_examples=length).examples()]
    counts = Counter(map(kind, specs))
    assert set(counts.values()) == {length // 4, (length + 3) // 4}
    assert max(counts, key=counts.__getitem__) == "sum"
    assert 0.95 < sum(map(bounded, specs)) / (length / 2) <= 1.0


@pytest.mark.slow
def test_there_are_10000_distinct_test_problems_in_equal_shares() -> None:
    listed = WideFunctions(num_examples=10_000).examples()
    assert len({example.text for example in listed}) == 10_000
    counts = Counter(kind(example.reference["spec"]) for example in listed)
    assert set(counts.values()) == {2_500}


def test_training_draws_are_disjoint_from_validation_and_test_of_both_classes() -> None:
    """``PythonFunctions``, which has no validation split, may train on validation problems."""
    held = {
        split: {
            one.text
            for seed in range(3)
            for one in WideFunctions(split, num_examples=300, seed=seed).examples()
        }
        for split in ("validation", "test")
    }
    small = {one.text for one in PythonFunctions("test", num_examples=300).examples()}
    rng = random.Random(0)
    wide = {WideFunctions("train").draw_pair(rng)[0] for _ in range(2_000)}
    narrow = {PythonFunctions("train").draw_pair(rng)[0] for _ in range(1_000)}
    assert not held["validation"] & held["test"]
    assert not wide & (held["validation"] | held["test"] | small)
    assert not narrow & (held["test"] | small)


def test_the_split_of_a_wide_function_is_a_rule_of_its_key() -> None:
    """Tenth 0 is the test, as for all generated tasks, 1 validation; each key is of one split."""
    task = WideFunctions()
    for key in map(str, range(200)):
        problem = Problem(key=key, text="", reference={})
        of = [split for split in task.splits if task.is_of_split(problem, split)]
        assert of == [{0: "test", 1: "validation"}.get(tenth_of(key), "train")]
