"""Prompts from a file of one's own."""

from __future__ import annotations

import pytest

from lit_dlm.tasks.base import Task
from lit_dlm.tasks.prompts_file import PromptsFile
from tests.e2e.runs import write_jsonl

ROWS = [{"id": "a", "prompt": "Say 2.\n", "answer": 2}, {"id": 7, "prompt": "b", "answer": "x"}]


def _file(folder, *rows):
    return write_jsonl(folder / "prompts.jsonl", list(rows))


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
    [
        ("exact", "2", "2."),
        ("numeric", "so 2.0", "3"),
        ("math", "\\boxed{4/2}", "\\boxed{3}"),
        ("chartqa", "2.1", "2.11"),
        ("vqa", "Two", "3"),
    ],
)
def test_gradings(tmp_path, grading, right, wrong):
    answers = {"answers": [{"answer": "2"}, "2", "2", "3"]}
    task = PromptsFile(_file(tmp_path, ROWS[0] | answers), grading=grading)
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
        ([{"id": "a", "prmpt": "p"}], "none", "line 1: expected 'messages', .* got id, prmpt"),
        ([{"id": "a", "prompt": "p"}], "exact", "line 1: .* one of response, .*; got id, prompt"),
        ([{"prompt": "p", "answer": [2]}], "exact", "line 1: field 'answer' must be a text or a n"),
        ([ROWS[1]], "numeric", "line 1: the answer must hold a number, got 'x'"),
        ([ROWS[0], ROWS[0]], "none", "line 2: id 'a' is taken by .*line 1"),
        ([ROWS[0]], "vqa", "line 1: field 'answers' must be a list of texts"),
        ([], "none", "expected at least one row"),
    ],
)
def test_bad_files_are_named_with_the_line(tmp_path, rows, grading, message):
    with pytest.raises(ValueError, match=message):
        PromptsFile(_file(tmp_path, *rows), grading=grading)


USER, SAYS = {"role": "user", "content": "2+3"}, {"role": "assistant", "content": "5"}
SYSTEM = {"role": "system", "content": "Add."}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+3", "answer": 5},
        {"question": "2+3", "response": "2+3 = 5", "answer": "5"},
        {"instruction": "2+3", "input": "", "output": "5"},
        {"messages": [USER, SAYS]},
        {"conversations": [{"from": "human", "value": "2+3"}, {"from": "gpt", "value": "5"}]},
    ],
)
def test_a_file_of_answered_prompts_is_one_of_prompts_too(tmp_path, row):
    """Without ids their numbers stand in the uids."""
    task = PromptsFile(_file(tmp_path, row), grading="exact")
    (example,) = task.examples()
    assert (example.uid, example.text) == ("prompts/test/000000", "2+3")
    assert example.reference == {"answer": "5"}


def test_turns_before_the_last_are_its_history(tmp_path):
    """A chat that ends with the user is a prompt; to grade, it must have an answer."""
    path = _file(tmp_path, {"messages": [SYSTEM, USER]})
    (example,) = PromptsFile(path).examples()
    assert (example.text, example.history) == ("2+3", [SYSTEM])
    with pytest.raises(ValueError, match="line 1: the last of 'messages' must be the assistant's"):
        PromptsFile(path, grading="exact")
