"""Numbers and expressions found in solutions, and how they are judged."""

from __future__ import annotations

import gzip
import json
from fractions import Fraction
from pathlib import Path

import pytest

from lit_dlm.grading import answers
from lit_dlm.grading.answers import (
    extract_math,
    extract_number,
    format_number,
    grade_exact,
    grade_math,
    grade_numeric,
    grade_relaxed,
    grade_vqa,
    last_boxed,
    normalised_vqa,
    parse_number,
    text_after_marker,
)

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
LLADA = SHARED / "llada_generations" / "gsm8k_llada8b_instruct_256_128.jsonl.gz"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first comparison takes seconds on a busy machine."""
    monkeypatch.setattr(answers, "MATH_SECONDS", 100.0)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{18}.", "18"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{a\}b}", r"a\}b"),
        (r"\fbox{x^{2}}", "x^{2}"),
        (r"\boxed 5", "5"),
        (r"\boxed{first} and \boxed{never closed", "first"),
        (r"\boxed{}", ""),
        (r"\boxedstuff{3}", None),
        ("no box", None),
    ],
)
def test_last_box(text, content):
    assert last_boxed(text) == content


def test_unclosed_boxes_cost_linear_time():
    """200,000 of them, each of which was searched for its end: hours."""
    text = "\\boxed{" * 200_000
    assert last_boxed(text) is None
    assert last_boxed(text + "7}") == "7"


@pytest.mark.parametrize("answer", ["\\frac{%s}{3}", "%s/3", "%s"])
def test_numbers_of_thousands_of_digits_are_no_answer(answer):
    """Python refuses to convert more than 4300 digits."""
    verdict = grade_numeric(f"\\boxed{{{answer % ('7' * 5000)}}}", "7")
    assert not verdict.is_correct


def test_marker_takes_the_rest_of_its_line():
    assert text_after_marker("#### 1\n#### 2 apples\nmore") == "2 apples"
    assert text_after_marker("####") is None
    assert text_after_marker("nothing") is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", 18),
        ("18.0", 18),
        ("$1,234.50", Fraction(2469, 2)),
        ("1{,}234", 1234),
        ("-3", -3),
        ("\N{MINUS SIGN}3", -3),
        (".5", Fraction(1, 2)),
        ("20\\%", 20),
        ("18 \\text{ dollars}", 18),
        ("x = 7", 7),
        ("12 m^2", 12),
        ("\\frac{1}{3}", Fraction(1, 3)),
        ("-\\dfrac{3}{4}", Fraction(-3, 4)),
        ("1/4", Fraction(1, 4)),
        ("1/0", 0),
        ("10,20", 20),
        ("5.", 5),
        ("none", None),
        ("9" * 500, None),
    ],
)
def test_parse_number(text, value):
    """``1/0`` is no fraction, so its last number counts; ``10,20`` is no thousands separator."""
    assert parse_number(text) == value


@pytest.mark.parametrize(
    ("completion", "number"),
    [
        ("16 - 3 = 13\n#### 13", "13"),
        ("#### $1,000.00 in total of 3 years", "1000"),
        ("#### 5\nThen I doubt: 7", "5"),
        ("#### unknown\n\\boxed{8}", "8"),
        ("\\boxed{18} dollars for 2 days", "18"),
        ("\\boxed{} so 32", "32"),
        ("It costs 5-3 = 2.", "2"),
        ("She has 3/4 left, that is 0.75.", "0.75"),
        ("twenty", None),
        ("", None),
    ],
)
def test_extract_number_prefers_marker_then_box_then_last(completion, number):
    assert extract_number(completion) == number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Fraction(18), "18"),
        (Fraction(-1, 2), "-0.5"),
        (Fraction(1, 3), "1/3"),
        (Fraction(1, 80), "0.0125"),
        (Fraction(-401, 4), "-100.25"),
        (Fraction(0), "0"),
    ],
)
def test_format_number_is_read_back_exactly(value, text):
    """1/80 = 125/10000: four places, since 80 = 2**4 * 5."""
    assert format_number(value) == text
    assert parse_number(text) == value


def test_numeric_grades():
    assert grade_numeric("#### 18", "18.0").is_correct
    wrong = grade_numeric("#### 17", "18.0")
    assert (wrong.status, wrong.answer, wrong.detail) == ("wrong", "17", "expected 18")
    assert grade_numeric("none", "18").status == "no_answer"
    # Exact: no float rounding makes these equal.
    assert not grade_numeric("#### 10000000000000001", "10000000000000000").is_correct
    with pytest.raises(ValueError, match="must hold a number, got 'x'"):
        grade_numeric("1", "x")


@pytest.mark.parametrize(
    ("completion", "status"), [(" yes\n", "right"), ("Yes", "wrong"), (" \n", "no_answer")]
)
def test_exact_grades(completion: str, status: str):
    assert grade_exact(completion, "yes").status == status


def test_a_tie_of_answers_is_told_alike_in_every_process():
    assert grade_vqa("red", ["blue", "green"]).detail == "expected blue"


def test_math_falls_back_to_the_marker():
    assert extract_math("#### $x^2$.") == "x^2"
    assert extract_math("\\boxed{} #### 3") == "3"
    assert extract_math("3") is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "gold", "status"),
    [
        (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}", "right"),
        (r"\boxed{0.5}", r"\frac{1}{2}", "right"),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", "right"),
        (r"\boxed{20\%}", "20", "right"),
        (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", "right"),
        (r"\boxed{(2, 1)}", "(1, 2)", "wrong"),
        (r"\boxed{\text{Carla}}", r"\text{Evelyn}", "wrong"),
        (r"\boxed{" + "1+" * 600 + "1}", "601", "wrong"),
        ("the answer is 3", "3", "no_answer"),
    ],
)
def test_math_grades(answer, gold, status):
    assert grade_math(answer, gold).status == status


@pytest.mark.skipif(not LLADA.exists(), reason="no LLaDA generations here")
def test_real_generations_are_graded_as_counted_by_hand():
    """890 of the 1,128 real LLaDA answers with a ground truth end in the right number.

    math-verify on complete boxes finds 858 of these; the others have an unclosed box, a box around
    words, or none, and were read one by one.
    """
    with gzip.open(LLADA, "rt") as file:
        rows = [json.loads(line) for line in file]
    usable = [row for row in rows if row["ground_truth"] is not None]
    assert len(usable) == 1128
    right = sum(
        grade_numeric(
            row["generations"].split("<|eot_id|>")[0], str(row["ground_truth"])
        ).is_correct
        for row in usable
    )
    assert right == 890


@pytest.mark.parametrize(
    ("text", "normalised"),
    [
        ("The  Two\n dogs.", "2 dogs"),
        ("dont know", "don't know"),
        ("black/white", "black white"),  # no space beside the mark: it becomes one
        ("yes, sir", "yes sir"),
        ("1,000 a-b", "1000 ab"),  # a comma that groups digits takes all marks away
        ("3.5", "3.5"),
        ("none", "0"),
    ],
)
def test_vqa_normalisation(text: str, normalised: str):
    assert normalised_vqa(text) == normalised


@pytest.mark.parametrize(
    ("completion", "answers", "score"),
    [
        ("Two.", ["2"] * 10, 1.0),
        # Two of ten said so: eight people see 2 others (2/3 each), two see 1 (1/3 each).
        ("red", ["red"] * 2 + ["blue"] * 8, (8 * 2 / 3 + 2 * 1 / 3) / 10),
        # Three: seven see 3, three see 2.
        ("a red", ["red"] * 3 + ["blue"] * 7, (7 * 1 + 3 * 2 / 3) / 10),
        ("green", ["red"] * 10, 0.0),
        ("red", ["Red"], 1.0),
    ],
)
def test_vqa_accuracy_by_hand(completion: str, answers: list[str], score: float):
    verdict = grade_vqa(completion, answers)
    assert verdict.score == pytest.approx(score)
    assert verdict.is_correct == (score >= 0.5)


@pytest.mark.parametrize(
    ("completion", "gold", "right"),
    [
        ("95", "100", True),
        ("94.99", "100", False),
        ("105.0", "100", True),
        ("12 %", "0.12", True),
        ("12", "12%", False),
        ("1,050", "1000", True),
        ("0.01", "0", False),  # five per cent of nothing
        ("0", "0", True),
        ("-95", "-100", True),
        ("germany", "Germany", True),
        ("Germany.", "Germany", False),
        ("about 100", "100", False),
    ],
)
def test_chartqa_relaxed_accuracy_by_hand(completion: str, gold: str, right: bool):
    assert grade_relaxed(completion, gold).is_correct == right


def test_empty_short_answers_are_none():
    assert grade_vqa(" ", ["x"]).status == grade_relaxed(" ", "x").status == "no_answer"
