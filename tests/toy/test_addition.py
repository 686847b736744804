"""Addition: fixed widths, carries, split and grading."""

import pytest

from lit_dlm.tasks.base import PromptExample
from lit_dlm.toy.addition import Addition

EXAMPLE = PromptExample(
    uid="addition/test/00000",
    task="addition",
    text="0483+0917",
    reference={"a": "0483", "b": "0917", "answer": "01400"},
)


def test_every_answer_is_the_sum_at_fixed_width() -> None:
    task = Addition(num_examples=80)
    for example in task.examples():
        first, second = example.text.split("+")
        assert len(first) == len(second) == 8
        assert example.reference["answer"] == f"{int(first) + int(second):09d}"
        assert task.grade(example, task.reference_completion(example)).is_correct


def test_columns_of_nine_are_as_frequent_as_asked() -> None:
    """0.4 by choice and a tenth of the others: 0.4 + 0.6 / 10 = 0.46."""
    task = Addition("train", num_examples=300)
    columns = [
        int(a) + int(b) == 9
        for example in task.examples()
        for a, b in zip(example.reference["a"], example.reference["b"], strict=True)
    ]
    assert sum(columns) / len(columns) == pytest.approx(0.46, abs=0.04)


@pytest.mark.parametrize(
    ("completion", "status", "answer"),
    [
        ("01400", "right", "01400"),
        (" 01400\n", "right", "01400"),
        ("1400", "wrong", "1400"),
        ("01500", "wrong", "01500"),
        ("", "no_answer", None),
    ],
)
def test_grades(completion: str, status: str, answer: str | None) -> None:
    verdict = Addition().grade(EXAMPLE, completion)
    assert (verdict.status, verdict.answer) == (status, answer)
