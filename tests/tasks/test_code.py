"""Tasks whose completions are code: how rows become tests, and what the sandbox says of answers."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lit_dlm import tasks
from lit_dlm.grading import SandboxLimits
from tests.tasks.rows import (
    DATA,
    FUNCTION,
    PROGRAM,
    STDIO,
    contest_test,
    grades,
    needs_data,
    only,
    references,
    task_of,
)

# Graded code runs in processes of its own; some solutions write patterns as plain strings.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:invalid escape sequence")]

RUNS: dict[str, Any] = {"allow_code_execution": True}
PATIENT = SandboxLimits(wall_seconds=300.0, cpu_seconds=300.0)
HUMANEVAL = str(DATA / "humaneval" / "HumanEval.jsonl.gz")
MINI = str(DATA / "humaneval" / "HumanEvalPlus-Mini.jsonl.gz")
SENTENCES = str(DATA / "mbpp" / "mbpp.jsonl.gz")


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def test_both_methods_are_read(tmp_path: Path):
    task = task_of(tasks.CodeTests, tmp_path, FUNCTION, STDIO, split="train", name="prime")
    function, program = task.examples()
    assert (task.name, function.uid, function.task) == ("prime", "prime/train/00000", "prime")
    assert function.reference["entry_point"] == "square"
    assert function.reference["test_list"] == FUNCTION["test_list"]
    assert function.text.startswith("Square a number.\n\nAnswer with")
    assert "standard input" in program.text
    assert program.reference["test_input"] == STDIO["test_input"]
    code = "def square(x): return x"
    assert task.extract(function, code) == f"import math\n\n\n{code}"
    assert task.extract(program, fenced("print(3)")) == "print(3)\n"
    bare, example = only(tasks.CodeTests, tmp_path, {**FUNCTION, "solution": None})
    with pytest.raises(ValueError, match="has no field 'solution'"):
        bare.reference_completion(example)


@pytest.mark.parametrize(
    ("tests", "name"),
    [
        (["assert f(2) == 4"], "f"),
        (["assert sorted(f(g(2))) == [1]", "assert f(1) == 2"], "f"),
        (["p = Pair(1, 2)\nassert longest([p]) == 1", "assert longest([]) == 0"], "longest"),
        (["import math\nassert math.isclose(area(1), 3.1)"], "area"),
        (["from copy import copy\nassert copy(select([1])) == [1]"], "select"),
        (["assert Solution().twoSum([1, 2], 3) == [0, 1]"], "Solution"),
        (["assert [f(n) for n in range(3)] == [0, 1, 4]"], "f"),
    ],
)
def test_the_entry_point_is_what_most_tests_call(tmp_path: Path, tests: list[str], name: str):
    _, example = only(tasks.CodeTests, tmp_path, {**FUNCTION, "test_list": tests})
    assert example.reference["entry_point"] == name


def test_solutions_pass_and_others_get_the_share_of_tests(tmp_path: Path):
    """Doubling squares 2 but not 3; printing 7 answers the second input only."""
    task = task_of(tasks.CodeTests, tmp_path, FUNCTION, STDIO, **RUNS)
    others = zip(task.examples(), ("def square(x):\n    return x + x", "print(7)"), strict=True)
    found = [(one.status, one.score) for one in grades(task, [*references(task), *others])]
    assert found == [("right", 1.0)] * 2 + [("wrong", 0.5)] * 2
    # A prefix may be the header of the function.
    row = FUNCTION | {"prefix": "def square(x):\n"}
    task, example = only(tasks.CodeTests, tmp_path, row, **RUNS)
    codes = ("return x * x", "def square(x):\n    return x * x", "return x + x")
    found = grades(task, [(example, fenced(code)) for code in codes])
    assert [verdict.status for verdict in found] == ["right", "right", "wrong"]


TESTS = """
import pytest
from solution import half as halve

def test_halves():
    assert halve(3) == pytest.approx(1.5)

def test_zero():
    assert halve(0) == 0

def test_negative():
    with pytest.raises(ValueError, match="neg"):
        halve(-1)

if __name__ == "__main__":
    pytest.main()
"""
HALF = "def half(x):\n    if x < 0:\n        raise ValueError('negative')\n    return x / 2"
KOD = {"question": "Halve it.", "solution": HALF, "test_code": TESTS, "test_info": None}
# A millionth of a million is 1, but does not count where ``abs`` alone is given.
APPROX = (
    "import pytest\nfrom solution import half\n\ndef test_it():\n    got = half(2e6)\n"
    "    assert got == pytest.approx(1e6, rel=None)\n"
    "    assert got != pytest.approx(1e6, abs=0.4)"
)
UNSENT = (
    "import pytest\nfrom solution import half\n\ndef test_it():\n"
    "    with pytest.raises(ValueError):\n        half(object())"
)
INFINITE = (
    "import pytest\nfrom solution import half\n\ndef test_it():\n"
    "    assert half(2) != pytest.approx(float('inf'))"
)
WHOLE = "import solution as s\n\ndef test_it():\n    assert s.half(4) == 2"


@pytest.mark.parametrize(
    ("tests", "code", "status", "score"),
    [
        (TESTS, HALF, "right", 1.0),
        (TESTS, "def half(x):\n    return x / 2", "wrong", 2 / 3),  # nothing is raised
        (TESTS, "def half(x):\n    raise ValueError('other')", "runtime_error", 0.0),
        (TESTS, "def third(x):\n    return x", "no_answer", None),
        (TESTS, "import sys\nsys.exit(0)\ndef half(x): pass", "runtime_error", None),
        (WHOLE, HALF, "right", 1.0),
        (UNSENT, HALF, "wrong", 0.0),  # the error is the sandbox's own
        (INFINITE, HALF, "right", 1.0),
        (APPROX, "def half(x):\n    return x / 2 + 0.5", "right", 1.0),
    ],
)
def test_tests_of_pytest_grade_in_the_sandbox(tmp_path: Path, tests, code, status, score):
    """None of these rows is of KodCode."""
    task, example = only(tasks.KodCode, tmp_path, KOD | {"test_code": tests}, **RUNS)
    verdict = task.grade(example, fenced(code))
    assert (verdict.status, verdict.score) == (status, score and pytest.approx(score))


def test_a_row_of_kodcode_in_the_form_of_humaneval_has_a_stub(tmp_path: Path):
    """The filtered set of the TraceLock release has ``prompt``, ``test`` and ``entry_point``."""
    row = {"prompt": "import math\n\ndef root(x):\n", "entry_point": "root"}
    row["test"] = "def check(candidate):\n    assert candidate(9) == 3"
    task, example = only(tasks.KodCode, tmp_path, row, template="tracelock-code", **RUNS)
    assert "Problem:\nimport math\n\ndef root(x):\n\nUnit tests:\ndef check" in example.text
    assert task.grade(example, "    return math.sqrt(x)").is_correct


def test_a_helper_named_check_is_not_the_form_of_humaneval(tmp_path: Path):
    tests = "from solution import half\ndef check(x):\n    assert half(2 * x) == x\n"
    row = KOD | {"test_code": f"{tests}def test_a():\n    check(3)"}
    task, example = only(tasks.KodCode, tmp_path, row, **RUNS)
    assert task.grade(example, fenced(HALF)).is_correct


@pytest.mark.parametrize(
    ("tests", "problem"),
    [
        ("def test_a(capsys):\n    half(1)", "test_a needs pytest"),
        ("import numpy as np\ndef test_a():\n    half(1)", "the tests import 'numpy'"),
        ("from pytest import raises\ndef test_a():\n    half(1)", "the tests import 'pytest'"),
        ("def half(x):\n    return 1\ndef test_a():\n    half(1)", "define 'half' themselves"),
        ("assert half(2) == 1", "no function named test_"),
        ("def test_a(:", "do not parse"),
    ],
)
def test_what_the_sandbox_cannot_run_is_ungraded(tmp_path: Path, tests: str, problem: str):
    row = KOD | {"test_code": tests, "entry_point": "half"}
    task, example = only(tasks.KodCode, tmp_path, row, **RUNS)
    verdict = task.grade(example, fenced(HALF))
    assert (verdict.status, problem in verdict.detail) == ("ungraded", True)


@needs_data
def test_solutions_of_the_demo_are_right_and_empty_functions_are_not():
    task = tasks.KodCode(str(DATA / "kodcode" / "kodcode_demo_232.jsonl.gz"), **RUNS)
    empty = "def {}(*args, **kwargs):\n    return None"
    pairs = references(task)
    pairs += [(e, empty.format(e.reference["entry_point"])) for e in task.examples()[::4]]
    found = [verdict.status for verdict in grades(task, pairs)]
    assert Counter(found[:232]) == {"right": 220, "wrong": 6, "ungraded": 6}
    assert "right" not in found[232:]


CLASS = {
    "question_content": "Add the numbers of a list to k.",
    "starter_code": "class Solution:\n    def total(self, nums: List[int], k: int):\n        ",
    "public_test_cases": json.dumps([contest_test("[1, 2]\n4", "7", "functional")]),
    "private_test_cases": json.dumps([contest_test("[]\n30000", "30000", "functional")]),
}
ADDS = "a, b = map(int, input().split())\nprint(a + b)"
TOTAL = (
    "class Solution:\n    def total(self, nums: List[int], k: int) -> int:\n"
    "        return sum(nums, start=k)"
)


def test_programs_and_classes_of_contests_are_run_on_all_tests(tmp_path: Path):
    made = task_of(tasks.LiveCodeBench, tmp_path, PROGRAM, CLASS, **RUNS)
    program, method = made.examples()
    assert program.reference["test_output"] == ["3\n", "12\n", "0\n"]
    assert made.grade(program, fenced(ADDS)).is_correct
    almost = made.grade(program, fenced(ADDS.replace("a + b", "a + b or 1")))
    assert (almost.status, almost.score) == ("wrong", 2 / 3)
    assert made.grade(program, "print(reduce(add, map(int, stdin.read().split())))").is_correct
    assert "Complete this code" in method.text
    assert made.grade(method, fenced(TOTAL)).is_correct
    plain = "def total(nums, k):\n    return sum(nums, start=k)"
    assert made.grade(method, fenced(plain)).is_correct
    wrong = made.grade(method, fenced(TOTAL.replace("start=k", "start=3")))
    assert (wrong.is_correct, wrong.score) == (False, 0.0)
    deep = "self.total(nums, k - 1) + 1 if k else sum(nums)"
    deeper = made.grade(method, fenced(TOTAL.replace("sum(nums, start=k)", deep)))
    assert deeper.is_correct


def test_outputs_of_contests_are_compared_as_in_the_release(tmp_path: Path):
    """Lines count, but not the space within; a tuple is as good as a list."""

    def is_right(row: dict[str, Any], test: dict[str, str], code: str) -> bool:
        row = row | {"public_test_cases": json.dumps([test]), "private_test_cases": "[]"}
        task, example = only(tasks.LiveCodeBench, tmp_path, row, **RUNS)
        return task.grade(example, fenced(code)).is_correct

    lines, values = contest_test("", "1 2\n3\n"), contest_test("[1]\n2", "[1, 2]")
    printed = [is_right(PROGRAM, lines, f"print({s!r})") for s in ("1  2 \n3", "1 2 3", "1\n2 3")]
    assert printed == [True, False, False]
    codes = [
        TOTAL.replace("sum(nums, start=k)", f"{s[0]}*nums, k{s[1]}") for s in ("()", "[]", "{}")
    ]
    assert [is_right(CLASS, values, code) for code in codes] == [True, True, False]


def test_each_test_of_a_contest_has_its_time(tmp_path: Path):
    """Seven tests of 0.6 s, with 1.5 s for each; the eighth would take a minute."""
    tests = [contest_test(f"[{n}]\n0", "0", "functional") for n in [0.6] * 7 + [60]]
    row = CLASS | {"public_test_cases": json.dumps(tests), "private_test_cases": "[]"}
    task, example = only(tasks.LiveCodeBench, tmp_path, row, **RUNS)
    assert example.reference["seconds"] == 6
    example.reference["seconds"] = 1.5
    code = TOTAL.replace("return sum(nums, start=k)", "return __import__('time').sleep(*nums) or k")
    verdict = task.grade(example, fenced(code))
    assert (verdict.status, verdict.score) == ("timeout", 7 / 8)


@needs_data
def test_prompts_of_humaneval_show_the_stub_and_no_test_and_canonical_solutions_are_right():
    """All in a fenced block; some as bare text, which the stub's imports stand before."""
    plain = tasks.HumanEval(HUMANEVAL, **RUNS)
    plain.limits = PATIENT
    first = plain.examples()[0]
    assert (first.uid, "check(" in first.text) == ("humaneval/test/00000", False)
    assert "def has_close_elements" in first.text
    shown = tasks.HumanEval(HUMANEVAL, template="tracelock-code", limit=1).examples()[0]
    assert "def check(candidate)" in shown.text
    pairs = references(plain)
    assert len(pairs) == 164
    few = [example for example, _ in pairs[::6]]
    bare = [(example, example.reference["solution"]) for example in few]
    assert all(verdict.is_correct for verdict in grades(plain, pairs + bare))
    # Stubs are wrong, and a forged helper of the prompt, by which HumanEval/32 checks, is not used.
    empty = [(example, "    pass\n") for example in few]
    forged = "def poly(xs, x):\n    return 0.0\n\ndef find_zero(xs):\n    return 0.0"
    empty.append((plain.examples()[32], fenced(forged)))
    assert not any(verdict.is_correct for verdict in grades(plain, empty))


@needs_data
def test_humaneval_plus_agrees_with_evalplus_but_for_its_known_defect():
    """Canonical solutions pass; evalplus 0.3.1 itself can never pass HumanEval/32.

    ``numbers`` sorted, but compared with ``<=``: only an added test tells.
    """
    mini = tasks.HumanEvalPlus(MINI, **RUNS)
    examples = [mini.examples()[i] for i in (0, 2, 4, 32, 95)]
    verdicts = grades(mini, [(e, mini.reference_completion(e)) for e in examples])
    assert [(v.status, v.score) for v in verdicts] == [("right", 1.0)] * 5
    code = examples[0].reference["solution"].replace("< threshold", "<= threshold")
    assert "<= threshold" in code
    verdict = mini.grade(examples[0], code)
    assert (verdict.status, verdict.detail[:10]) == ("wrong", "plus input")
    rules = {e.reference["entry_point"]: mini.problem(e).rule for e in mini.examples()}
    assert rules.pop("find_zero") == "root"
    assert set(rules.values()) == {"close"}


@needs_data
@pytest.mark.parametrize(
    ("index", "change"), [(0, ("<", "<=")), (2, ("number -", "number +")), (53, ("+", "-"))]
)
def test_evalplus_gives_the_same_verdicts(index, change, monkeypatch):
    """The library's own check, in its own process, on right and slightly wrong solutions."""
    monkeypatch.setenv("HUMANEVAL_OVERRIDE_PATH", MINI)
    evaluation = pytest.importorskip("evalplus.eval", reason="the extra 'code' is missing")
    trusted_exec = pytest.importorskip("evalplus.gen.util").trusted_exec
    mini = tasks.HumanEvalPlus(MINI, **RUNS)
    example = mini.examples()[index]
    reference = example.reference
    inputs, name = reference["base_input"] + reference["plus_input"], reference["entry_point"]
    stub, canonical = reference["stub"], reference["solution"]
    body = canonical.removeprefix(stub)
    assert change[0] in body
    expected, spent = trusted_exec(canonical, inputs, name, record_time=True)
    for code in (canonical, stub + body.replace(*change)):
        given = (inputs, name, expected, reference["atol"], spent)
        status, _ = evaluation.untrusted_check("humaneval", code, *given)
        ours = mini.grade(example, fenced(code))
        assert ours.is_correct == (status == "pass"), (status, ours)


def by_number(task: Any) -> dict[int, Any]:
    return {int(e.uid[-5:]): e for e in task.examples()}


@needs_data
@pytest.mark.parametrize(
    ("split", "count"), [("test", 500), ("train", 374), ("validation", 90), ("prompt", 10)]
)
def test_canonical_solutions_of_the_official_splits_are_right(split, count):
    """11..510 = 500, 601..974 = 374, 511..600 = 90, 1..10 = 10; every eighth is run."""
    task = tasks.MBPP(SENTENCES, split=split, **RUNS)
    task.limits = PATIENT
    pairs = references(task)
    assert len(pairs) == count
    assert {verdict.status for verdict in grades(task, pairs[::8])} == {"right"}


@needs_data
def test_prompts_of_mbpp_show_the_tests_and_partial_credit_counts_them():
    task = tasks.MBPP(SENTENCES, split="prompt", **RUNS)
    example = by_number(task)[3]  # is_not_prime: tests want False, True, False, True
    assert example.uid == "mbpp/prompt/00003"
    assert "assert is_not_prime(2) == False" in example.text
    verdict = task.grade(example, fenced("def is_not_prime(n):\n    return True"))
    assert (verdict.status, round(verdict.score * 4) / 4) == ("wrong", 0.75)


@needs_data
def test_retyped_inputs_and_special_rules_of_mbpp_plus_pass_canonical_solutions():
    """2 compares sets, 6 ints, 16 presence of a match, 124 complex, 252 complex text, 793 no
    added inputs, 115 sets."""
    pytest.importorskip("evalplus", reason="the extra 'code' is not installed")
    plus = tasks.MBPPPlus(str(DATA / "mbpp" / "MbppPlus.jsonl.gz"), **RUNS)
    found = by_number(plus)
    examples = [found[n] for n in (2, 6, 16, 115, 124, 252, 793) if n in found]
    assert len(examples) >= 5
    verdicts = grades(plus, [(e, plus.reference_completion(e)) for e in examples])
    assert {verdict.status for verdict in verdicts} == {"right"}
    problem = plus.problem(found[2])
    assert (problem.rule, type(problem.base_inputs[0][0])) == ("same_set", tuple)
    code = f"def {found[6].reference['entry_point']}(a, b):\n    return True"
    assert plus.grade(found[6], fenced(code)).status == "wrong"
    assert found[2].text.startswith("Write a function")
    assert '"""' not in found[2].text
