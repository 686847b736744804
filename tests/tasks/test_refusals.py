"""Rows and options that a task refuses, in one line with the file, the line and the field."""

import base64
import pickle
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from lit_dlm import tasks
from tests.tasks.rows import (
    FUNCTION,
    PLUS,
    PRO,
    PROGRAM,
    SENTENCE,
    STDIO,
    SYSTEM,
    USER,
    task_of,
)

ASKED = {"id": "a", "prompt": "Say 2.\n", "answer": "x"}
SEEN = {"question": "Which?", "ground_truth_answer": "B"}
NOT_JSON = base64.b64encode(b"x").decode()
ROWS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("GSM8K", {"question": "q", "answer": "five"}, {}, "'answer'"),
    ("MATH", {"prompt": "p", "answer": "1"}, {}, "'problem'"),
    ("MATH", {"problem": "p", "solution": "none"}, {}, "'answer' or a boxed solution"),
    ("PromptsFile", {"id": "a", "prompt": " "}, {}, "'prompt'"),
    ("PromptsFile", {"id": "a", "prompt": 3}, {}, "'prompt'"),
    ("PromptsFile", {"id": [], "prompt": "p"}, {}, "'id'"),
    ("PromptsFile", {"id": "a#1", "prompt": "p"}, {}, "#number at the end .*'a#1'"),
    ("PromptsFile", {"id": "a@b", "prompt": "p"}, {}, "no @ .*'a@b'"),
    ("PromptsFile", {"id": "a", "prmpt": "p"}, {}, "'messages'.*'prmpt'"),
    ("PromptsFile", {"id": "a", "prompt": "p"}, {"grading": "exact"}, "one of response"),
    ("PromptsFile", {"prompt": "p", "answer": [2]}, {"grading": "exact"}, "'answer'"),
    ("PromptsFile", {"prompt": "p", "answer": None}, {"grading": "exact"}, "'answer', got None"),
    ("PromptsFile", ASKED, {"grading": "numeric"}, "a number, got 'x'"),
    ("PromptsFile", {"messages": [SYSTEM, USER]}, {"grading": "exact"}, "assistant's as the last"),
    ("PromptsFile", {"messages": [SYSTEM]}, {}, "user's as the last of 'messages'"),
    ("PromptsFile", {"conversations": [{"from": "cat"}]}, {}, "'conversations'"),
    ("MMLUPro", PRO | {"options": "ab"}, {}, "'options' or 'choices'"),
    ("MMLUPro", PRO | {"options": ["a"]}, {}, r"2 to 26 options .*\(1, 1\)"),
    ("MMLUPro", PRO | {"answer_index": 3}, {}, r"2 to 26 options .*\(3, 3\)"),
    ("MMLUPro", PRO | {"answer_index": "no"}, {}, "'answer_index' or 'answer'"),
    ("MMMU", PRO | {"options": "[1"}, {}, "'options'"),
    ("MMMU", PRO | {"options": "f(1)"}, {}, "'options'"),
    ("MMMU", PRO | {"options": "-" * 50_000 + "1"}, {}, "'options'"),
    ("MMMU", PRO | {"options": f"{['a'] * 100_000}"}, {}, "'options'"),
    ("SEEDBench", SEEN | {"image": "no.png"}, {}, r"no\.png: .*no such file"),
    ("SEEDBench", SEEN | {"image": 7}, {}, "'images'"),
    ("SEEDBench", SEEN | {"image": "/etc/passwd"}, {}, "inside .*, got '/etc/passwd'"),
    ("SEEDBench", SEEN | {"image": [{"path": "/proc/kmsg"}]}, {}, "inside .*, got '/proc/kmsg'"),
    ("SEEDBench", SEEN | {"image": "a/../../a.png"}, {}, r"inside .*, got 'a/../../a\.png'"),
    ("SEEDBench", SEEN | {"image": "no\0.png"}, {}, "null byte"),
    ("SEEDBench", SEEN | {"image": "a" * 300}, {}, "too long"),
    ("CodeTests", FUNCTION | {"test_method": "pytest"}, {}, "test_method .*'pytest'"),
    ("CodeTests", FUNCTION | {"test_list": []}, {}, "'test_list'"),
    ("CodeTests", FUNCTION | {"test_list": ["assert f("]}, {}, r"'assert f\(' does not parse"),
    ("CodeTests", FUNCTION | {"test_list": ["assert len([])"]}, {}, "a function of the answer"),
    ("CodeTests", FUNCTION | {"test_time_limit": 0}, {}, "'test_time_limit'"),
    ("CodeTests", STDIO | {"test_output": ["3"]}, {}, "as many test_output as test_input"),
    ("CodeTests", STDIO | {"test_input": "1 2"}, {}, "'test_input'"),
    ("CodeTests", {"question": "?"}, {}, "'test_method'"),
    ("CodeTests", STDIO | {"question": None}, {}, "'question', got None"),
    ("LiveCodeBench", PROGRAM | {"private_test_cases": "?"}, {}, "'private_test_cases'"),
    ("LiveCodeBench", PROGRAM | {"private_test_cases": NOT_JSON}, {}, "'private_test_cases'"),
    ("LiveCodeBench", PROGRAM | {"private_test_cases": "[{}]"}, {}, "'private_test_cases'"),
    ("LiveCodeBench", PROGRAM | {"starter_code": "class Solution: ..."}, {}, "'starter_code'"),
    ("MBPP", SENTENCE | {"task_id": "11"}, {}, "'task_id'"),
    ("MBPP", SENTENCE, {"split": "train"}, "of the split 'train'"),
    ("MBPP", SENTENCE | {"code": "x = 1"}, {}, "call a function of field 'code'"),
    ("HumanEvalPlus", PLUS | {"base_input": None}, {}, "'base_input'"),
    ("HumanEvalPlus", PLUS | {"atol": -1}, {}, "'atol'"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "row", "options", "message"), ROWS)
def test_a_bad_row_is_named(tmp_path: Path, kind, row, options, message: str):
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 1: .*{message}"):
        task_of(getattr(tasks, kind), tmp_path, row, **options)


def test_a_split_of_mbpp_is_an_official_one(tmp_path: Path):
    with pytest.raises(ValueError, match=r"split: expected .*'validation'.*, got 'dev'"):
        task_of(tasks.MBPP, tmp_path, SENTENCE, split="dev")


def test_an_id_may_be_there_once(tmp_path: Path):
    with pytest.raises(ValueError, match=r"line 2: expected an id .*line 1, got 'a'"):
        task_of(tasks.PromptsFile, tmp_path, ASKED, ASKED)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tasks.GSM8K("gsm8k.jsonl", limit=0), "limit: expected at least 1"),
        (tasks.HumanEvalPlus, r"path: expected .*'humaneval\+'"),
        (tasks.MBPPPlus, r"path: expected .*'mbpp\+'"),
    ],
)
def test_a_bad_option_is_named(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    task = task_of(tasks.MBPPPlus, tmp_path, PLUS, allow_code_execution=True)
    for module in ("evalplus.data.mbpp", "evalplus.eval._special_oracle"):
        monkeypatch.setitem(sys.modules, module, None)  # importing it fails
    with pytest.raises(ValueError, match=r"evalplus: pip install 'evalplus==0\.3\.1' "):
        task.problem(task.examples()[0])


def test_packed_tests_run_no_code(tmp_path: Path):
    """A pickle that would call a function is read for its texts, and has none that is JSON."""

    class Call:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    evil = base64.b64encode(zlib.compress(pickle.dumps(Call()))).decode()
    with pytest.raises(ValueError, match="holds no tests"):
        task_of(tasks.LiveCodeBench, tmp_path, PROGRAM | {"private_test_cases": evil})
    assert not (tmp_path / "ran").exists()


def test_packed_tests_do_not_fill_the_memory(tmp_path: Path):
    bomb = base64.b64encode(zlib.compress(b" " * (80 << 20))).decode()
    with pytest.raises(ValueError, match=r"holds no tests \(expected at most \d+ bytes"):
        task_of(tasks.LiveCodeBench, tmp_path, PROGRAM | {"private_test_cases": bomb})
