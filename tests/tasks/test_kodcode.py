"""KodCode: prompts, and tests in the manner of pytest run in the sandbox. No row is of KodCode."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lit_dlm.tasks import KodCode
from lit_dlm.tasks.kodcode import checks
from tests.e2e.runs import write_jsonl

DEMO = (
    Path(__file__).parents[2].parent / "shared" / "data" / "kodcode" / "kodcode_demo_232.jsonl.gz"
)
SOLUTION = "def half(x):\n    if x < 0:\n        raise ValueError('negative')\n    return x / 2"
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
ROW = {"question": "Halve it.", "solution": SOLUTION, "test_code": TESTS, "test_info": None}


def kodcode(folder: Path, row: dict, **options) -> KodCode:
    return KodCode(write_jsonl(folder / "rows.jsonl", [row]), **options)


@pytest.mark.parametrize(
    ("code", "status", "score"),
    [
        (SOLUTION, "right", None),
        ("def half(x):\n    return x / 2", "wrong", 2 / 3),  # nothing is raised
        ("def half(x):\n    raise ValueError('other')", "runtime_error", 0.0),
        ("def third(x):\n    return x", "no_answer", None),
        ("import sys\nsys.exit(0)\ndef half(x): pass", "runtime_error", None),
    ],
)
def test_tests_of_pytest_grade_in_the_sandbox(tmp_path: Path, code: str, status: str, score):
    task = kodcode(tmp_path, ROW, allow_code_execution=True)
    (example,) = task.examples()
    verdict = task.grade(example, f"```python\n{code}\n```")
    assert verdict.status == status
    if score is not None:
        assert verdict.score == pytest.approx(score)


def test_the_module_may_be_imported_whole(tmp_path: Path):
    tests = "import solution as s\n\ndef test_it():\n    assert s.half(4) == 2"
    task = kodcode(tmp_path, ROW | {"test_code": tests}, allow_code_execution=True)
    (example,) = task.examples()
    assert task.grade(example, task.reference_completion(example)).is_correct


def test_a_row_in_the_form_of_humaneval_has_a_stub(tmp_path: Path):
    """The filtered set of the TraceLock release has ``prompt``, ``test`` and ``entry_point``."""
    row = {
        "prompt": "import math\n\ndef root(x):\n",
        "test": "def check(candidate):\n    assert candidate(9) == 3",
        "entry_point": "root",
    }
    task = kodcode(tmp_path, row, allow_code_execution=True, template="tracelock-code")
    (example,) = task.examples()
    assert "Problem:\nimport math\n\ndef root(x):\n\nUnit tests:\ndef check" in example.text
    assert task.grade(example, "    return math.sqrt(x)").is_correct


@pytest.mark.parametrize(
    ("tests", "problem"),
    [
        ("def test_a(capsys):\n    half(1)", "test_a needs pytest"),
        ("import numpy as np\ndef test_a():\n    half(1)", "the tests import 'numpy'"),
        ("def half(x):\n    return 1\ndef test_a():\n    half(1)", "define 'half' themselves"),
        ("assert half(2) == 1", "no function named test_"),
        ("def test_a(:", "do not parse"),
    ],
)
def test_what_the_sandbox_cannot_run_is_ungraded(tmp_path: Path, tests: str, problem: str):
    with pytest.raises(ValueError, match=problem):
        checks(tests, "half")
    row = ROW | {"test_code": tests, "entry_point": "half"}
    task = kodcode(tmp_path, row, allow_code_execution=True)
    (example,) = task.examples()
    verdict = task.grade(example, task.reference_completion(example))
    assert verdict.status == "ungraded"
    assert problem in verdict.detail


def test_running_code_needs_permission(tmp_path: Path):
    task = kodcode(tmp_path, ROW)
    (example,) = task.examples()
    with pytest.raises(ValueError, match="allow_code_execution"):
        task.grade(example, task.reference_completion(example))


@pytest.mark.slow
@pytest.mark.skipif(not DEMO.exists(), reason="no KodCode file here")
def test_solutions_of_the_demo_are_right_and_empty_functions_are_not():
    task = KodCode(str(DEMO), allow_code_execution=True)
    examples = task.examples()
    empty = "def {}(*args, **kwargs):\n    return None"
    pairs = [(e, task.reference_completion(e)) for e in examples]
    pairs += [(e, empty.format(e.reference["entry_point"])) for e in examples]
    with ThreadPoolExecutor(2) as pool:
        found = [verdict.status for verdict in pool.map(lambda pair: task.grade(*pair), pairs)]
    assert Counter(found[:232]) == {"right": 218, "wrong": 8, "ungraded": 6}
    assert "right" not in found[232:]
