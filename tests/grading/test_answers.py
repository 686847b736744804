"""Numbers and expressions found in solutions, and how they are judged."""

import gzip
import json
import re
from fractions import Fraction
from pathlib import Path

import pytest

from lit_dlm.grading import answers
from lit_dlm.grading.answers import grade_math, grade_numeric, last_boxed, parse_number
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
        ("parse_number", "18.0", 18),
        ("parse_number", "$1,234.50", Fraction(2469, 2)),
        ("parse_number", "1{,}234", 1234),
        ("parse_number", "-3", -3),
        ("parse_number", "\N{MINUS SIGN}3", -3),
        ("parse_number", ".5", Fraction(1, 2)),
        ("parse_number", "20\\%", 20),
        ("parse_number", "18 \\text{ dollars}", 18),
        ("parse_number", "x = 7", 7),
        ("parse_number", "12 m^2", 12),
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
        ("extract_number", "#### $1,000.00 in total of 3 years", "1000"),
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
        ("extract_number", "#### 1/3 of 6", "1/3"),
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
    ],
)
def test_short_answers_by_hand(grade: str, completion: str, gold: str, status: str):
    assert getattr(answers, f"grade_{grade}")(completion, gold).status == status


def test_verdicts_name_what_was_expected():
    wrong = grade_numeric("#### 17", "18.0")
    assert (wrong.status, wrong.answer, wrong.detail) == ("wrong", "17", "expected 18")
    with pytest.raises(ValueError, match="must hold a number, got 'x'"):
        grade_numeric("1", "x")


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
def test_math_grades(answer: str, gold: str, status: str):
    assert grade_math(answer, gold).status == status


RIGHT_FORMULAS = r"""
0.5 ← \frac12
0.5 ← \frac{1}{2}
\frac{1}{2} ← 0.5
\frac{1}{2} ← \dfrac{1}{2}
\frac{1}{2} ← \tfrac12
\frac{1}{2} ← 1/2
\frac{1}{2} ← 50\%
\frac{3}{8} ← \dfrac 3 8
\dfrac 3 8 ← \frac{3}{8}
1/3 ← 0.\overline{3}
1/3 ← 0.\bar{3}
0.\overline{3} ← \frac13
\frac{1}{6} ← 0.1\overline{6}
\frac{41}{333} ← 0.\overline{123}
-\frac{1}{3} ← -0.\overline{3}
7/3 ← 2 1/3
7/3 ← 2\frac{1}{3}
7/3 ← 2 \frac13
\frac{7}{3} ← 2\ \frac{1}{3}
-\frac{7}{3} ← -2\frac{1}{3}
-15\frac{3}{5} ← -15.6
6\frac{1}{6}\text{ feet} ← \frac{37}{6}
2.5 ← 2\frac{1}{2}
[1,3] ← 1\le x\le 3
[1,3) ← 1\le x<3
(1,3) ← 1<x<3
1\le x\le 3 ← [1,3]
(-\infty,1) ← x<1
x<1 ← (-\infty,1)
x<1 ← 1>x
(1,2) ← (1, 2)
\{1,2\} ← 2,1
1,2 ← 2, 1
\left(1, \frac{1}{2}\right) ← (1, 0.5)
5 \text{ or } 6 ← 5, 6
-2 \text{ or } -12 ← -12, -2
\pm 2 ← 2, -2
50\% ← 0.5
50\% ← 50
50\% ← 50\%
50\% ← 50 %
20 \% ← 20\%
50\% ← \frac{1}{2}
12.5\% ← 12.5
12.5\% ← 0.125
12.5\% ← \frac18
\frac{100}{3}\% ← 33\frac{1}{3}\%
90^\circ ← 90°
90^\circ ← 90^{\circ}
90^\circ ← 90
90 ← 90^\circ
90 ← 90°
90^\circ ← 90 \text{ degrees}
18 ← \text{\$}18
18 ← \$18
18 ← \$18.00
18 ← 18\text{ dollars}
18 ← 18.
\$18 ← 18
\$1,\!657 ← 1657
20\text{ miles} ← 20
9\text{ values} ← 9
72 \text{ cubic inches} ← 72\text{ in}^3
1\ 000 ← 1000
1000 ← 1\ 000
1000 ← 1\,000
1000 ← 1 000
1000000 ← 1 000 000
1000 ← 1,000
1000 ← 1{,}000
12 ← 12
5 ← 5.
5 ← 5.0
5 ← +5
5 ← x = 5
x = 5 ← 5
\frac{7}{5} + \frac{1}{5} i. ← \frac{7+i}{5}
30^\circ. ← 30^\circ
{17}. ← 17
i ← \sqrt{-1}
1+2i ← 1+2\sqrt{-1}
1+2i ← 2i+1
5-12i ← -12i+5
\text{June 20} ← June 20
\text{June 20} ← \text{June 20}
\text{Evelyn} ← Evelyn
\text{Friday} ← \mathrm{Friday}
\text{(A)} ← A
\text{(A)} ← (A)
\text{A} ← A
A ← \text{A}
1011_2 ← 1011_2
1011_2 ← 1011_{2}
12_5 ← 12_{5}
43_5. ← 43_5
10^3 ← 1000
1000 ← 10^{3}
18 ← 1.8 \times 10^1
6 \times 10^{-3} ← 0.006
0.006 ← 6 \cdot 10^{-3}
\sqrt{8} ← 2\sqrt{2}
2\sqrt2 ← 2\sqrt{2}
\frac{\sqrt{2}}{2} ← \frac{1}{\sqrt{2}}
x^2+2x+1 ← (x+1)^2
x^2 ← x^{2}
x+y ← y+x
\frac{x}{2} ← 0.5x
\pi ← \pi
2\pi ← \pi \cdot 2
\infty ← \infty
\begin{pmatrix}1\\2\end{pmatrix} ← \begin{bmatrix}1\\2\end{bmatrix}
\begin{pmatrix} -1 & 0 \\ 0 & -1 \end{pmatrix}. ← \begin{pmatrix}-1&0\\0&-1\end{pmatrix}
0.1 ← 1/10
.5 ← 0.5
20.0 ← 20\%
20.0 ← 20
"""
WRONG_FORMULAS = r"""
0.5 ← 0.5\%
50\% ← 0.5\%
50\% ← 5
50\% ← 0.05
20 ← 2\%
12 ← 1 2
123 ← 1 2 3
12 ← \frac12
2/3 ← 2 1/3
2/3 ← 2\frac{1}{3}
1 ← 2\frac12
0.5 ← 2\frac{1}{2}
22 ← 2 2
1011_2 ← 1011_3
1011_{2} ← 1011_{10}
12_5 ← 12_7
12_5 ← 21_5
22/7 ← 3.142857
1/3 ← 0.333333
1/3 ← 0.33
1/3 ← 0.3
\sqrt{2} ← 1.414214
\pi ← 3.14159
\pi ← 22/7
1/3 ← 0.\overline{6}
0.\overline{3} ← 0.3
[1,3] ← 1<x<3
(1,3) ← 1\le x\le 3
[1,3] ← [1,4]
(1,2) ← (2,1)
\{1,2\} ← \{1,3\}
5 ← 5, 6
6 ← 5 \text{ or } 6
18 ← 18 or 20
20 ← 18 or 20
90^\circ ← 80°
90^\circ ← 9
18 ← \text{\$}19
18 ← \$1.8
1\ 000 ← 100
1000 ← 1 00
1000 ← 1.000
5 ← .5
5 ← 5.5
5 ← x > 5
i ← -\sqrt{-1}
i ← \sqrt{1}
2i ← \sqrt{-2}
1+2i ← 1-2i
\text{June 20} ← June 2
\text{June 20} ← June 21
\text{June 20} ← July 20
\text{Evelyn} ← \text{Carla}
\text{(A)} ← B
x^2 ← x^3
x+1 ← x-1
10^3 ← 10
18 ← 1.8
1000 ← 10
"""
RIGHT_NUMBERS = r"""
2.5 ← \boxed{2\frac{1}{2}}
2.5 ← \boxed{2 \frac12}
2.5 ← #### 2 1/2
2.5 ← \boxed{2 1/2}
-2.5 ← #### -2 1/2
0.5 ← \boxed{\frac12}
0.5 ← \boxed{\frac{1}{2}}
0.5 ← #### \frac12
1000 ← \boxed{10^{3}}
1000 ← #### 10^3
18 ← \boxed{1.8 \times 10^1}
18 ← #### 1.8 \times 10^1
1000 ← #### 1 000
1000 ← \boxed{1\ 000}
1000 ← \boxed{1\,000}
1000000 ← #### $1 000 000
1000 ← #### 1,000
18 ← #### 18.
18 ← #### 18.00
18 ← #### **18**
18 ← #### $18 per day
18 ← #### 18 dollars for 2 or 3 people
18 ← #### 18 (9 * 2)
18 ← #### 3 * 6 = 18
18 ← #### 18 = 3 * 6
18 ← \boxed{3 \times 6 = 18}
18 ← \boxed{16 + 2}
18 ← \boxed{\text{\$}18}
18 ← \boxed{\$18 \text{ per day}}
18 ← \boxed{18 \text{ m}^2}
18 ← \boxed{18 m^2}
18 ← \boxed{x = 18}
18 ← \boxed{\left(18\right)}
4 ← \boxed{\sqrt{16}}
60 ← \boxed{60\%}
90 ← \boxed{90^\circ}
1/3 ← \boxed{0.\overline{3}}
1/3 ← #### 1/3 of 6
1000 ← #### $10^3$.
1000 ← #### \(10^3\)
18 ← #### <18>
18 ← #### 18 - see above
18 ← #### 18x
18 ← #### 18 m/s
0.9 ← #### 18/20
"""
WRONG_NUMBERS = r"""
0.5 ← \boxed{2\frac{1}{2}}
0.5 ← #### 2 1/2
2 ← #### 2 1/2
12 ← \boxed{\frac12}
2 ← \boxed{\frac12}
10 ← \boxed{10^{3}}
3 ← \boxed{10^{3}}
10 ← #### 10^3
10 ← \boxed{1.8 \times 10^1}
1.8 ← #### 1.8 \times 10^1
18 ← #### 18 or 20
20 ← #### 18 or 20
18 ← #### 18 dollars or 20 dollars
18 ← #### 18, 20
18 ← #### 18 \text{ or } 20
20 ← \boxed{18 \text{ or } 20}
20 ← \boxed{18, 20}
18 ← \boxed{18 \text{ dollars or } 20}
1 ← #### 1 000
0 ← #### 1 000
3 ← #### 3 * 6 = 18
2 ← \boxed{16 + 2}
16 ← \boxed{\sqrt{16}}
3 ← \boxed{5-3}
5 ← \boxed{5-3}
18 ← #### 18/20
"""
TABLES = {
    ("math", "right"): RIGHT_FORMULAS,
    ("math", "wrong"): WRONG_FORMULAS,
    ("numeric", "right"): RIGHT_NUMBERS,
    ("numeric", "wrong"): WRONG_NUMBERS,
}
"""By grader and verdict, lines of the gold answer and what is answered; formulas are boxed."""
ROWS = [(*key, line) for key, lines in TABLES.items() for line in lines.split("\n")[1:-1]]


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
