"""Word problems: solutions in all styles grade right, others do not."""

import random
import re
from itertools import accumulate

import pytest

from lit_dlm.tasks.base import PromptExample
from lit_dlm.toy.word_problems import (
    MAX_COMPLETION_TOKENS,
    SEPARATORS,
    WordProblems,
    write_solution,
)

EXAMPLE = PromptExample(
    uid="word_problems/test/00000",
    task="word_problems",
    text="Tom has 34 pens, finds 7, loses 5. How many pens?",
    reference={"start": 34, "moves": [7, -5], "answer": 36},
)


def test_the_free_choices_are_three_separators_and_the_operand_order() -> None:
    written = {write_solution(34, [7, -5], random.Random(seed)) for seed in range(60)}
    assert written == {
        f"{first}=41{separator}41-5=36\n#### 36"
        for first in ("34+7", "7+34")
        for separator in SEPARATORS
    }


def test_every_style_of_every_problem_grades_right_and_computes_correctly() -> None:
    task = WordProblems("test", num_examples=150)
    for number, example in enumerate(task.examples()):
        assert task.grade(example, task.reference_completion(example)).is_correct
        reference = example.reference
        text = write_solution(reference["start"], reference["moves"], random.Random(number))
        assert task.grade(example, text).is_correct
        for a, sign, b, c in re.findall(r"(\d+)([-+])(\d+)=(\d+)", text):
            assert int(c) == int(a) + (1 if sign == "+" else -1) * int(b)


@pytest.mark.parametrize(
    ("completion", "status", "answer"),
    [
        ("34+7=41 so 41-5=36\n#### 36", "right", "36"),
        ("#### 12 no, #### 36", "right", "36"),
        ("#### 036", "right", "36"),
        ("34+7=41 so 41-5=36\n#### 35", "wrong", "35"),
        ("#### 360", "wrong", "360"),
        ("#### -36", "wrong", "-36"),
        ("34+7=41 so 41-5=36", "no_answer", None),
        ("", "no_answer", None),
    ],
)
def test_grades(completion: str, status: str, answer: str | None) -> None:
    verdict = WordProblems().grade(EXAMPLE, completion)
    assert (verdict.status, verdict.answer) == (status, answer)


def test_the_story_tells_the_numbers_of_the_reference() -> None:
    rng = random.Random(5)
    for _ in range(100):
        problem = WordProblems().draw(rng)
        told = [int(n) for n in re.findall(r"\d+", problem.text)]
        reference = problem.reference
        assert told == [reference["start"], *map(abs, reference["moves"])]
        assert all(0 <= total <= 99 for total in accumulate(reference["moves"], initial=told[0]))


def test_drills_hold_five_right_equations() -> None:
    rng = random.Random(0)
    for _ in range(50):
        equations = re.findall(r"(\d+)([-+])(\d+)=(\d+)", WordProblems("train").draw_drill(rng))
        assert len(equations) == 5
        assert all(int(c) == int(a) + (1 if s == "+" else -1) * int(b) for a, s, b, c in equations)


def test_completions_leave_room_for_the_end_of_text() -> None:
    rng = random.Random(1)
    task = WordProblems("train")
    for _ in range(500):
        _, text = task.draw_pair(rng)
        pieces = re.findall(r"\n#### |\d|[-+=]| so | then |\n", text)
        assert "".join(pieces) == text
        assert len(pieces) <= MAX_COMPLETION_TOKENS
