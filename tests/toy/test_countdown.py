"""Countdown: drawing, writing and checking."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from lit_dlm.tasks.base import PromptExample
from lit_dlm.toy.countdown import MAX_COMPLETION_TOKENS, Countdown
from lit_dlm.toy.countdown_arithmetic import (
    check_expression,
    check_steps,
    parse_steps,
    write_expression,
    write_steps,
)
from tests.e2e.runs import write_jsonl

# First row of Dream's three-number file, Apache-2.0.
REFERENCE = {"numbers": [15, 44, 79], "target": 50, "solution": "44-15=29,79-29=50"}
EXAMPLE = PromptExample(uid="u", task="countdown", text="15,44,79,50", reference=REFERENCE)


@pytest.mark.parametrize(
    ("completion", "status"),
    [
        ("44-15=29,79-29=50", "right"),
        ("44-15=29\n79-29=50", "right"),
        ("15+79=94,94-44=50", "right"),
        ("79-(44-15)", "right"),
        ("15-44=-29,-29+79=50", "right"),
        ("-44+15+79=50", "right"),
        ("- 44-15=29\n- 79-29=50", "right"),  # a list
        ("79-44+15=50", "right"),
        ("First 44 \N{MINUS SIGN} 15 = 29.\nThen 79 - 29 = 50.", "right"),
        ("44-15=29, wait\n<answer>(79 + 15) - 44</answer>", "right"),
        ("44-15=29,79-29=50\nThe answer is 50", "right"),
        ("1) 44-15=29\n 2) 79-29=50", "right"),
        ("1. 44-15=29\n2. 79-29=50", "right"),
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


def test_what_is_wrong_with_an_answer_is_said() -> None:
    numbers = [15, 44, 79]
    assert check_steps([(44, "-", 15, 29), (79, "-", 29, 50)], numbers, 50) == ""
    assert check_steps([(44, "-", 15, 30)], numbers, 50) == "44-15 is not 30"
    assert check_steps([(44, "-", 15, 29)], numbers, 29) == "not every number is used"
    assert check_steps([(16, "-", 15, 1)], numbers, 1) == "16 is not available"
    assert check_steps([(7, "/", 2, 3)], [7, 2], 3) == "7/2 is not 3"
    assert check_steps([(7, "/", 0, 0)], [7, 0], 0) == "7/0 is not 0"
    assert check_expression("8/3*3", [8, 3, 3], 8) == ""  # exactly; with floats it might not be
    assert check_expression("5+5", [5, 5], 10) == ""
    assert check_expression("5+5+5", [5, 5], 15) == "the numbers are not each used once"
    assert check_expression("1/0", [1, 0], 0).startswith("cannot be evaluated")
    verdict = Countdown().grade(EXAMPLE, "(" * 5_000 + "1+1" + ")" * 5_000)
    assert (verdict.status, verdict.detail) == ("wrong", "too long")


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_drawn_problems_are_right_in_both_styles(count: int) -> None:
    rng, task = random.Random(count), Countdown(counts=(count,))
    for _ in range(60):
        reference = task.draw(rng).reference
        numbers, target = reference["numbers"], reference["target"]
        steps = parse_steps(reference["solution"])
        assert check_steps(steps, numbers, target) == ""
        assert check_expression(write_expression(numbers, steps), numbers, target) == ""
        assert 10 <= target <= 100
        assert all(1 <= n <= 99 for n in numbers)
        assert len(write_steps(steps)) <= MAX_COMPLETION_TOKENS


@pytest.mark.parametrize(
    ("numbers", "steps", "text"),
    [
        # Sums and differences keep the given order: the signs are the answer.
        ([15, 44, 79], [(44, "-", 15, 29), (79, "-", 29, 50)], "15-44+79=50"),
        ([2, 3, 4], [(2, "+", 3, 5), (5, "*", 4, 20)], "(2+3)*4=20"),
        ([2, 3, 4], [(3, "*", 4, 12), (12, "-", 2, 10)], "3*4-2=10"),
        ([2, 3, 4], [(4, "-", 2, 2), (3, "*", 2, 6)], "3*(4-2)=6"),
        ([24, 2, 3], [(2, "*", 3, 6), (24, "/", 6, 4)], "24/(2*3)=4"),
        ([24, 6, 3], [(6, "/", 3, 2), (24, "-", 2, 22)], "24-6/3=22"),
    ],
)
def test_expressions_by_hand(numbers: list[int], steps: list, text: str) -> None:
    assert write_expression(numbers, steps) == text
    assert check_expression(text, numbers, steps[-1][3]) == ""


@pytest.mark.parametrize("style", ["steps", "expression", "worked"])
def test_training_pairs_grade_right(style: str) -> None:
    task = Countdown("train", style=style, counts=(2, 3, 4))
    rng = random.Random(0)
    for _ in range(100):
        text, completion = task.draw_pair(rng)
        *numbers, target = map(int, text.split(","))
        reference = {"numbers": numbers, "target": target}
        assert task.grade(replace(EXAMPLE, reference=reference), completion).is_correct


def test_drills_are_right_and_sums_come_in_either_operand_order() -> None:
    rng, task = random.Random(0), Countdown("train", counts=(2,))
    with pytest.raises(ValueError, match=r"drills\.style: expected 'worked', got 'steps'"):
        task.draw_drill(rng)
    larger_first = set()
    worked = Countdown("train", style="worked")
    for _ in range(50):
        drill = parse_steps(worked.draw_drill(rng))
        assert len(drill) == 6
        assert all(result == (a + b if sign == "+" else a - b) for a, sign, b, result in drill)
    for _ in range(300):
        ((a, sign, b, _),) = parse_steps(task.draw_pair(rng)[1])
        larger_first |= {a > b} if sign == "+" else set()
    assert larger_first == {True, False}


def test_files_of_both_formats_are_read(tmp_path: Path) -> None:
    of_dream = {"input": "15,44,79,50", "output": "44-15=29,79-29=50"}
    rows = [of_dream, {"input": "15,44,79", "output": "50"}]  # and of d1
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    task = Countdown("test", path)
    dream, d1 = task.examples()
    assert Countdown("test", path, num_examples=1).examples() == [dream]
    assert (dream.uid, dream.text) == ("countdown/test/rows-00000", "15,44,79,50")
    assert (d1.text, dream.reference) == (dream.text, REFERENCE)
    assert d1.reference == {**REFERENCE, "solution": None}
    assert task.grade(dream, task.reference_completion(dream)).is_correct
    with pytest.raises(ValueError, match="countdown/test/rows-00001: the row has no solution"):
        task.reference_completion(d1)
