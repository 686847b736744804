"""LiveCodeBench's files: programs, classes, both forms of private tests."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest

from lit_dlm.tasks import LiveCodeBench
from tests.e2e.runs import write_jsonl


def packed(tests: list[dict[str, str]]) -> str:
    """As in code_generation_lite."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


def one(given: str, wanted: str, kind: str = "stdin") -> dict[str, str]:
    return {"input": given, "output": wanted, "testtype": kind}


PROGRAM = {
    "question_content": "Print the sum of two numbers.",
    "starter_code": "",
    "public_test_cases": json.dumps([one("1 2\n", "3\n")]),
    "private_test_cases": packed([one("5 7\n", "12\n"), one("0 0\n", "0\n")]),
}
CLASS = {
    "question_content": "Add the numbers of a list to k.",
    "starter_code": "class Solution:\n    def total(self, nums: List[int], k: int):\n        ",
    "public_test_cases": json.dumps([one("[1, 2]\n4", "7", "functional")]),
    "private_test_cases": json.dumps([one("[]\n1", "1", "functional")]),
}
ADDS = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
TOTAL = (
    "```python\nclass Solution:\n    def total(self, nums: List[int], k: int) -> int:\n"
    "        return sum(nums, start=k)\n```"
)


def task(folder: Path, *rows: dict[str, Any]) -> LiveCodeBench:
    path = write_jsonl(folder / "t.jsonl", list(rows))
    return LiveCodeBench(path, allow_code_execution=True)


def test_programs_and_classes_are_run_on_all_tests(tmp_path: Path):
    made = task(tmp_path, PROGRAM, CLASS)
    program, method = made.examples()
    assert program.reference["test_output"] == ["3\n", "12\n", "0\n"]
    assert made.grade(program, ADDS).is_correct
    almost = made.grade(program, ADDS.replace("a + b", "a + b or 1"))
    assert (almost.status, almost.score) == ("wrong", 2 / 3)
    assert "Complete this code" in method.text
    assert made.grade(method, TOTAL).is_correct
    wrong = made.grade(method, TOTAL.replace("start=k", "start=3"))
    assert (wrong.is_correct, wrong.score) == (False, 0.0)


@pytest.mark.parametrize("text", ["?", base64.b64encode(b"x").decode(), "[{}]"])
def test_damaged_tests_are_named(tmp_path: Path, text: str):
    with pytest.raises(ValueError, match=r"line 1: field 'private_test_cases' holds no tests"):
        task(tmp_path, {**PROGRAM, "private_test_cases": text})


def test_packed_tests_run_no_code(tmp_path: Path):
    """A pickle that would call a function is read for its texts, and has none that is JSON."""

    class Call:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    evil = base64.b64encode(zlib.compress(pickle.dumps(Call()))).decode()
    with pytest.raises(ValueError, match="holds no tests"):
        task(tmp_path, {**PROGRAM, "private_test_cases": evil})
    assert not (tmp_path / "ran").exists()
