"""GSM8K: prompts, uids, and grades of the reference solutions."""

from __future__ import annotations

from pathlib import Path

import pytest

from lit_dlm.tasks.base import Task
from lit_dlm.tasks.gsm8k import GSM8K
from tests.e2e.runs import write_jsonl

REAL = Path(__file__).parents[2].parent / "shared" / "data" / "gsm8k"
ROWS = [
    {"question": "How many is 2 and 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"},
    {"question": "And 1000 more?", "answer": "So 1,005.\n#### 1,005"},
    {"question": "Three?", "answer": "#### 3"},
]


@pytest.fixture
def path(tmp_path):
    return write_jsonl(tmp_path / "test.jsonl", ROWS)


def test_prompt_asks_for_the_answer_line_and_uid_is_the_place_in_the_file(path):
    task = GSM8K(path)
    assert isinstance(task, Task)
    first = task.examples()[0]
    assert first.uid == "gsm8k/test/00000"
    assert first.text.startswith("How many is 2 and 3?\n\n")
    assert "#### <answer>" in first.text
    assert "5" not in first.text


def test_uids_do_not_depend_on_seed_or_limit(path):
    by_uid = {e.uid: e.text for e in GSM8K(path).examples()}
    chosen = GSM8K(path, seed=1, limit=2).examples()
    assert len(chosen) == 2
    assert all(by_uid[e.uid] == e.text for e in chosen)


def test_grades(path):
    task = GSM8K(path)
    example = task.examples()[1]
    assert task.reference_completion(task.examples()[0]) == "2 + 3 = 5\n#### 5"
    assert task.grade(example, "#### $1005.00").is_correct
    assert task.extract(example, "is \\boxed{1{,}005}") == "1005"
    assert task.grade(example, "#### 1004").status == "wrong"
    assert task.grade(example, "many").status == "no_answer"


def test_a_row_without_an_answer_line_is_named(tmp_path):
    path = write_jsonl(tmp_path / "bad.jsonl", [{"question": "q", "answer": "five"}])
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 1: field 'answer'"):
        GSM8K(path)


@pytest.mark.skipif(not REAL.exists(), reason="no GSM8K files here")
def test_all_reference_solutions_grade_as_right():
    task = GSM8K(str(REAL), split="test")
    examples = task.examples()
    assert len(examples) == 1319
    assert all(task.grade(e, task.reference_completion(e)).is_correct for e in examples)
