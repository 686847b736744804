"""Numbers and expressions found in solutions, and how they are judged."""

import gzip
import json
import re
from fractions import Fraction
from pathlib import Path

import pytest

from lit_dlm.grading import answers
from lit_dlm.grading.answers import grade_numeric, last_boxed, parse_number
from tests.grading.hostile import programs
from tests.tasks.rows import DATA

LLADA = DATA / "llada_generations" / "gsm8k_llada8b_instruct_256_128.jsonl.gz"

DIGITS = "7" * 5000


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first comparison takes seconds on a busy machine."""
    monkeypatch.setattr(answers, "MATH_SECONDS", 100.0)


@pytest.mark.parametrize(
    ("read", "text", "found"),
    [
        ("last_boxed", r"so \boxed{18}.", "18"),
        ("last_boxed", r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("last_boxed", r"\boxed{a\}b}", r"a\}b"),
        ("last_boxed", r"\fbox{x^{2}}", "x^{2}"),
        ("last_boxed", r"\boxed 5", "5"),
        ("last_boxed", r"\boxed{first} and \boxed{never closed", "first"),
        ("last_boxed", r"\boxed{}", ""),
        ("last_boxed", r"\boxedstuff{3}", None),
        ("last_boxed", "no box", None),
        ("text_after_marker", "#### 1\n#### 2 apples\nmore", "2 apples"),
        ("text_after_marker", "####", None),
        ("text_after_marker", "nothing", None),
        ("parse_number", "18", 18),
        ("parse_number", "$1,234.50", Fraction(2469, 2)),
        ("parse_number", "1{,}234", 1234),
        ("parse_number", "-3", -3),
        ("parse_number", "\N{MINUS SIGN}3", -3),
        ("parse_number", ".5", Fraction(1, 2)),
        ("parse_number", "20\\%", 20),
        ("parse_number", "18 \\text{ dollars}", 18),
        ("parse_number", "x = 7", 7),
        ("parse_number", "\\frac{1}{3}", Fraction(1, 3)),
        ("parse_number", "-\\dfrac{3}{4}", Fraction(-3, 4)),
        ("parse_number", "1/4", Fraction(1, 4)),
        ("parse_number", "1/0", 0),  # no fraction, so its last number counts
        ("parse_number", "10,20", 20),  # no thousands separator
        ("parse_number", "5.", 5),
        ("parse_number", "none", None),
        ("parse_number", "9" * 500, None),
        ("parse_number", "-1.5e3", -1500),
        ("parse_number", "2E-1 m", Fraction(1, 5)),
        ("parse_number", "1e500", None),
        # The marker goes before the box, and the box before the last number.
        ("extract_number", "16 - 3 = 13\n#### 13", "13"),
        ("extract_number", "#### 1e5", "100000"),
        ("extract_number", "#### 5\nThen I doubt: 7", "5"),
        ("extract_number", "#### unknown\n\\boxed{8}", "8"),
        ("extract_number", "\\boxed{18} dollars for 2 days", "18"),
        ("extract_number", "\\boxed{} so 32", "32"),
        ("extract_number", "#### Step 2: times 6\n3*6. So \\boxed{18}.", "18"),
        ("extract_number", "It costs 5-3 = 2.", "2"),
        ("extract_number", "She has 3/4 left, that is 0.75.", "0.75"),
        ("extract_number", "5/6 of 18 is 18 * 5/6 = 15", "15"),
        ("extract_number", "12/4=3\n#### 3", "3"),
        ("extract_number", "#### -\\frac{1}{2} m", "-0.5"),
        ("extract_number", "The answer is -3 / 4.", "-0.75"),
        ("extract_number", "It is \\dfrac{1}{3}.", "1/3"),
        ("extract_number", "so x-3/4", "0.75"),
        # No fractions: dates, decimals, groups of thousands, a zero below.
        ("extract_number", "on 24/12/2031", "2031"),
        ("extract_number", "1.5/2", "2"),
        ("extract_number", "1,000/5", "5"),
        ("extract_number", "3/4.5", "4.5"),
        ("extract_number", "7/0", "0"),
        ("extract_number", "twenty", None),
        ("extract_number", "", None),
        ("extract_math", "#### $x^2$.", "x^2"),
        ("extract_math", "\\boxed{} #### 3", "3"),
        ("extract_math", "3", None),
    ],
)
def test_what_is_read_from_a_text(read: str, text: str, found: object):
    assert getattr(answers, read)(text) == found


def test_unclosed_boxes_cost_linear_time():
    """200,000 of them, each of which was searched for its end: hours."""
    text = "\\boxed{" * 200_000
    assert last_boxed(text) is None
    assert last_boxed(text + "7}") == "7"


def test_format_number_is_read_back_exactly():
    """1/80 = 125/10000: four places, since 80 = 2**4 * 5."""
    texts = {"18": 18, "-0.5": Fraction(-1, 2), "1/3": Fraction(1, 3), "0.0125": Fraction(1, 80)}
    texts |= {"-100.25": Fraction(-401, 4), "0": 0}
    assert {text: parse_number(text) for text in texts} == texts
    assert [answers.format_number(Fraction(value)) for value in texts.values()] == [*texts]


@pytest.mark.parametrize(
    ("grade", "completion", "gold", "status"),
    [
        ("numeric", "#### 18", "18.0", "right"),
        ("numeric", "none", "18", "no_answer"),
        # Exact: no float rounding makes these equal.
        ("numeric", "#### 10000000000000001", "10000000000000000", "wrong"),
        # Python refuses to convert more than 4300 digits.
        ("numeric", f"\\boxed{{\\frac{{{DIGITS}}}{{3}}}}", "7", "wrong"),
        ("numeric", f"\\boxed{{{DIGITS}/3}}", "7", "wrong"),
        ("numeric", f"\\boxed{{{DIGITS}}}", "7", "no_answer"),
        ("exact", " yes\n", "yes", "right"),
        ("exact", "Yes", "yes", "wrong"),
        ("exact", " \n", "yes", "no_answer"),
        ("math", "the answer is 3", "3", "no_answer"),
        ("math", r"\boxed{" + "1+" * 600 + "1}", "601", "wrong"),  # too long to be compared
    ],
)
def test_short_answers_by_hand(grade: str, completion: str, gold: str, status: str):
    assert getattr(answers, f"grade_{grade}")(completion, gold).status == status


def test_verdicts_name_what_was_expected():
    wrong = grade_numeric("#### 17", "18.0")
    assert (wrong.status, wrong.answer, wrong.detail) == ("wrong", "17", "expected 18")
    with pytest.raises(ValueError, match="must hold a number, got 'x'"):
        grade_numeric("1", "x")


ROWS = [
    (*key.split(), line)
    for key, lines in programs("../verdicts.txt").items()
    for line in lines.split("\n")
]
"""Grader and verdict, and the gold answer with what is answered; formulas are boxed."""
PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "benchmark.md").read_text(encoding="utf-8")
DISPUTED = re.findall(r"^\| `(.+)` \| `(.+)` \| (right|wrong) \|", PAGE, re.MULTILINE)
ROWS += [("math", status, f"{gold} ← {answer}") for gold, answer, status in DISPUTED]


@pytest.mark.slow
@pytest.mark.parametrize(("grading", "status", "line"), ROWS)
def test_verdicts_on_ways_to_write_an_answer(grading: str, status: str, line: str) -> None:
    """The last of them are what the page on benchmarks says of math-verify."""
    gold, answer = line.split(" ← ")
    completion = f"\\boxed{{{answer}}}" if grading == "math" else answer
    assert answers.GRADERS[grading].grade(completion, gold).status == status


@pytest.mark.skipif(not LLADA.exists(), reason="no LLaDA generations here")
def test_real_generations_are_graded_as_counted_by_hand():
    """890 of the 1,128 real LLaDA answers with a ground truth end in the right number.

    math-verify on complete boxes finds 858 of these; the others have an unclosed box, a box around
    words, or none, and were read one by one.
    """
    with gzip.open(LLADA, "rt") as file:
        rows = [json.loads(line) for line in file]
    found = [
        grade_numeric(row["generations"].split("<|eot_id|>")[0], str(row["ground_truth"]))
        for row in rows
        if row["ground_truth"] is not None
    ]
    assert (len(found), sum(verdict.is_correct for verdict in found)) == (1128, 890)
