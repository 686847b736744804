"""Prompts from a file of one's own."""

from __future__ import annotations

import json

import pytest

from lit_dlm.tasks.base import Task
from lit_dlm.tasks.prompts_file import PromptsFile

ROWS = [{"id": "a", "prompt": "Say 2.\n", "answer": 2}, {"id": 7, "prompt": "b", "answer": "x"}]


def _file(folder, *rows):
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_prompts_pass_unchanged_and_need_no_answers(tmp_path):
    task = PromptsFile(_file(tmp_path, {"id": "a", "prompt": "Say 2.\n"}), name="mine")
    assert isinstance(task, Task)
    example = task.examples()[0]
    assert (example.uid, example.text, example.reference) == ("mine/test/a", "Say 2.\n", {})
    assert not task.is_graded
    assert task.extract(example, " yes ") == "yes"
    with pytest.raises(ValueError, match="task 'mine' have no grader"):
        task.grade(example, "2")


@pytest.mark.parametrize(
    ("grading", "right", "wrong"),
    [("exact", "2", "2."), ("numeric", "so 2.0", "3"), ("math", "\\boxed{4/2}", "\\boxed{3}")],
)
def test_gradings(tmp_path, grading, right, wrong):
    task = PromptsFile(_file(tmp_path, ROWS[0]), grading=grading)
    example = task.examples()[0]
    assert task.grade(example, right).is_correct
    assert not task.grade(example, wrong).is_correct
    assert task.grade(example, task.reference_completion(example)).is_correct


@pytest.mark.parametrize(
    ("rows", "grading", "message"),
    [
        ([{"id": "a", "prompt": " "}], "none", "line 1: field 'prompt' must not be empty"),
        ([{"id": "a", "prompt": 3}], "none", "line 1: field 'prompt' must be a text"),
        ([{"id": [], "prompt": "p"}], "none", "line 1: field 'id' must be a text or an integer"),
        ([{"prompt": "p"}], "none", "line 1: field 'id' is missing"),
        ([{"id": "a", "prompt": "p"}], "exact", "line 1: field 'answer' is missing"),
        ([ROWS[1]], "numeric", "line 1: field 'answer' must hold a number"),
        ([ROWS[0], ROWS[0]], "none", "line 2: id 'a' is taken by .*line 1"),
        ([], "none", "expected at least one row"),
        ([ROWS[0]], "fuzzy", "grading: expected none, exact, numeric or math, got 'fuzzy'"),
    ],
)
def test_bad_files_are_named_with_the_line(tmp_path, rows, grading, message):
    with pytest.raises(ValueError, match=message):
        PromptsFile(_file(tmp_path, *rows), grading=grading)
