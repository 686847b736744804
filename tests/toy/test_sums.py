"""Addition and word problems: what is drawn, how it is written, and grades."""

import random
import re
from itertools import accumulate

import pytest

from lit_dlm.tasks import PromptExample
from lit_dlm.toy import Addition, WordProblems
from lit_dlm.toy.word_problems import MAX_COMPLETION_TOKENS, SEPARATORS, write_solution

SUM = {"a": "0483", "b": "0917", "answer": "01400"}
STORY = {"start": 34, "moves": [7, -5], "answer": 36}


@pytest.mark.parametrize(
    ("task", "reference", "completion", "status", "answer"),
    [
        (Addition, SUM, "01400", "right", "01400"),
        (Addition, SUM, " 01400\n", "right", "01400"),
        (Addition, SUM, "1400", "wrong", "1400"),
        (Addition, SUM, "", "no_answer", None),
        (WordProblems, STORY, "34+7=41 so 41-5=36\n#### 36", "right", "36"),
        (WordProblems, STORY, "#### 12 no, #### 36", "right", "36"),
        (WordProblems, STORY, "#### 036", "right", "36"),
        (WordProblems, STORY, "34+7=41 so 41-5=36\n#### 35", "wrong", "35"),
        (WordProblems, STORY, "#### 360", "wrong", "360"),
        (WordProblems, STORY, "#### -36", "wrong", "-36"),
        (WordProblems, STORY, "34+7=41 so 41-5=36", "no_answer", None),
    ],
)
def test_grades(task: type, reference, completion: str, status: str, answer: str | None) -> None:
    example = PromptExample(uid="u", task=task.name, text="", reference=reference)
    verdict = task().grade(example, completion)
    assert (verdict.status, verdict.answer) == (status, answer)


def test_sums_have_a_fixed_width_and_columns_of_nine_as_often_as_asked() -> None:
    """Nine in 0.4 by choice and in a tenth of the others: 0.4 + 0.6 / 10 = 0.46."""
    nines = []
    for example in Addition("train", num_examples=300).examples():
        first, second = example.text.split("+")
        assert len(first) == len(second) == 8
        assert example.reference["answer"] == f"{int(first) + int(second):09d}"
        nines += [int(a) + int(b) == 9 for a, b in zip(first, second, strict=True)]
    assert sum(nines) / len(nines) == pytest.approx(0.46, abs=0.04)


def test_the_free_choices_are_three_separators_and_the_operand_order() -> None:
    written = {write_solution(34, [7, -5], random.Random(seed)) for seed in range(60)}
    assert written == {
        f"{first}=41{separator}41-5=36\n#### 36"
        for first in ("34+7", "7+34")
        for separator in SEPARATORS
    }


def _equations(text: str) -> list[bool]:
    found = re.findall(r"(\d+)([-+])(\d+)=(\d+)", text)
    return [int(c) == int(a) + (1 if sign == "+" else -1) * int(b) for a, sign, b, c in found]


def test_stories_and_their_solutions_are_right_and_leave_room_for_the_end_of_text() -> None:
    rng, task = random.Random(1), WordProblems("train")
    for _ in range(300):
        problem = task.draw(rng)
        reference, told = problem.reference, [int(n) for n in re.findall(r"\d+", problem.text)]
        assert told == [reference["start"], *map(abs, reference["moves"])]
        assert all(0 <= total <= 99 for total in accumulate(reference["moves"], initial=told[0]))
        text = task.write_answer(reference, rng)
        pieces = re.findall(r"\n#### |\d|[-+=]| so | then |\n", text)
        assert "".join(pieces) == text
        assert len(pieces) <= MAX_COMPLETION_TOKENS
        assert all(_equations(text))
        assert _equations(task.draw_drill(rng)) == [True] * 5
