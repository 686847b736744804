"""Countdown: drawing, solving, writing and checking."""

import json
import random
from fractions import Fraction
from pathlib import Path

import pytest

from lit_dlm.tasks.base import PromptExample
from lit_dlm.toy.countdown import MAX_COMPLETION_TOKENS, Countdown
from lit_dlm.toy.countdown_arithmetic import (
    check_expression,
    check_steps,
    parse_steps,
    solve,
    write_expression,
    write_steps,
)

EXAMPLE = PromptExample(  # first row of Dream's three-number file, Apache-2.0
    uid="countdown/test/x",
    task="countdown",
    text="15,44,79,50",
    reference={"numbers": [15, 44, 79], "target": 50, "solution": "44-15=29,79-29=50"},
)


@pytest.mark.parametrize(
    ("completion", "status"),
    [
        ("44-15=29,79-29=50", "right"),
        ("44-15=29\n79-29=50", "right"),
        ("15+79=94,94-44=50", "right"),
        ("79-(44-15)", "right"),
        ("79-44+15=50", "right"),
        ("First 44 \N{MINUS SIGN} 15 = 29.\nThen 79 - 29 = 50.", "right"),
        ("44-15=29, wait\n<answer>(79 + 15) - 44</answer>", "right"),
        ("44-15=29,79-29=50\nThe answer is 50", "right"),
        ("79-44=35,35+15=51", "wrong"),  # 35 + 15 is 50
        ("44-15=29,79-29=51", "wrong"),
        ("44-15=29,79-30=49", "wrong"),  # 30 is not there
        ("44-15=29,44+6=50", "wrong"),  # 44 is used up
        ("79-29=50", "wrong"),  # 29 is not there
        ("65-15=50", "wrong"),
        ("79-44+15=51", "wrong"),
        ("79-44+15+0=50", "wrong"),
        ("79-44=35", "wrong"),
        ("25**2/79/44*15", "wrong"),
        ("79//44-15", "wrong"),
        ("50", "no_answer"),
        ("", "no_answer"),
        ("no way", "no_answer"),
    ],
)
def test_grades(completion: str, status: str) -> None:
    assert Countdown().grade(EXAMPLE, completion).status == status


def test_a_very_long_answer_is_not_parsed() -> None:
    verdict = Countdown().grade(EXAMPLE, "(" * 5_000 + "1+1" + ")" * 5_000)
    assert (verdict.status, verdict.detail) == ("wrong", "too long")


def test_check_steps_says_what_is_wrong() -> None:
    numbers = [15, 44, 79]
    assert check_steps([(44, "-", 15, 29), (79, "-", 29, 50)], numbers, 50) == ""
    assert check_steps([(44, "-", 15, 30)], numbers, 50) == "44-15 is not 30"
    assert check_steps([(44, "-", 15, 29)], numbers, 29) == "not every number is used"
    assert check_steps([(16, "-", 15, 1)], numbers, 1) == "16 is not available"
    assert check_steps([(7, "/", 2, 3)], [7, 2], 3) == "7/2 is not 3"
    assert check_steps([(7, "/", 0, 0)], [7, 0], 0) == "7/0 is not 0"


def test_a_number_given_twice_may_be_used_twice_only() -> None:
    assert check_expression("5+5", [5, 5], 10) == ""
    assert check_expression("5+5+5", [5, 5], 15) == "the numbers are not each used once"


def test_expressions_are_exact() -> None:
    """8 / 3 * 3 is 8 exactly; with floats it might not be."""
    assert check_expression("8/3*3", [8, 3, 3], 8) == ""
    assert check_expression("1/0", [1, 0], 0).startswith("cannot be evaluated")


def test_solve_finds_a_solution_exactly_where_one_exists() -> None:
    """2, 3, 7: 7*3+2 = 23; 100 is above the largest value, 2*3*7 = 42."""
    steps = solve([2, 3, 7], 23)
    assert steps is not None
    assert check_steps(steps, [2, 3, 7], 23) == ""
    assert solve([2, 3, 7], 100) is None


@pytest.mark.parametrize("counts", [(2,), (3,), (4,), (5,)])
def test_drawn_problems_are_right_in_both_styles(counts: tuple[int, ...]) -> None:
    rng, task = random.Random(counts[0]), Countdown(counts=counts)
    for _ in range(60):
        problem = task.draw(rng)
        numbers, target = problem.reference["numbers"], problem.reference["target"]
        steps = parse_steps(problem.reference["solution"])
        assert steps is not None
        assert check_steps(steps, numbers, target) == ""
        assert check_expression(write_expression(numbers, steps), numbers, target) == ""
        assert 10 <= target <= 100
        assert all(1 <= n <= 99 for n in numbers)
        assert len(write_steps(steps)) <= MAX_COMPLETION_TOKENS


def test_sums_and_differences_keep_the_given_order_in_an_expression() -> None:
    """15 - 44 + 79 = 50: the signs are the answer."""
    steps = [(44, "-", 15, 29), (79, "-", 29, 50)]
    assert write_expression([15, 44, 79], steps) == "15-44+79=50"


@pytest.mark.parametrize(
    ("numbers", "steps", "text"),
    [
        ([2, 3, 4], [(2, "+", 3, 5), (5, "*", 4, 20)], "(2+3)*4=20"),
        ([2, 3, 4], [(3, "*", 4, 12), (12, "-", 2, 10)], "3*4-2=10"),
        ([2, 3, 4], [(4, "-", 2, 2), (3, "*", 2, 6)], "3*(4-2)=6"),
        ([24, 2, 3], [(2, "*", 3, 6), (24, "/", 6, 4)], "24/(2*3)=4"),
        ([24, 6, 3], [(6, "/", 3, 2), (24, "-", 2, 22)], "24-6/3=22"),
    ],
)
def test_parentheses_by_hand(numbers: list[int], steps: list, text: str) -> None:
    assert write_expression(numbers, steps) == text
    assert check_expression(text, numbers, steps[-1][3]) == ""


@pytest.mark.parametrize("style", ["steps", "expression", "worked"])
def test_training_pairs_grade_right(style: str) -> None:
    task = Countdown("train", style=style, counts=(2, 3, 4))
    rng = random.Random(0)
    for _ in range(100):
        text, completion = task.draw_pair(rng)
        *numbers, target = map(int, text.split(","))
        example = PromptExample(
            uid="u", task="countdown", text=text, reference={"numbers": numbers, "target": target}
        )
        assert task.grade(example, completion).is_correct


def test_sums_may_come_in_either_operand_order() -> None:
    task = Countdown("train", counts=(2,))
    rng = random.Random(0)
    larger_first = [
        int(step[0]) > int(step[1])
        for step in (task.draw_pair(rng)[1].split("=")[0].split("+") for _ in range(300))
        if len(step) == 2
    ]
    assert any(larger_first)
    assert not all(larger_first)


def test_drills_are_right() -> None:
    rng = random.Random(0)
    for _ in range(50):
        steps = parse_steps(Countdown("train").draw_drill(rng))
        assert steps is not None
        for a, sign, b, result in steps:
            value = {"+": a + b, "-": a - b, "*": a * b, "/": Fraction(a, b)}[sign]
            assert value == result


def test_files_of_both_formats_are_read(tmp_path: Path) -> None:
    dream, d1 = tmp_path / "dream.jsonl", tmp_path / "d1.jsonl"
    dream.write_text(json.dumps({"input": "15,44,79,50", "output": "44-15=29,79-29=50"}) + "\n")
    d1.write_text(json.dumps({"input": "15,44,79", "output": "50"}) + "\n")
    for path, solution in ((dream, "44-15=29,79-29=50"), (d1, None)):
        task = Countdown("test", str(path))
        (example,) = task.examples()
        assert example.text == "15,44,79,50"
        assert example.reference == {**EXAMPLE.reference, "solution": solution}
        assert example.uid == f"countdown/test/{path.stem}-00000"
        assert task.grade(example, task.reference_completion(example)).is_correct
