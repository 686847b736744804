"""MATH: answers from the field or the solution's box, grades by equality."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from lit_dlm.grading import answers
from lit_dlm.tasks.base import Task, tasks_by_name
from lit_dlm.tasks.math import MATH
from tests.e2e.runs import write_jsonl

REAL = Path(__file__).parents[2].parent / "shared" / "data" / "math"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first comparison takes seconds on a busy machine."""
    monkeypatch.setattr(answers, "MATH_SECONDS", 100.0)


def _file(folder, *rows):
    return write_jsonl(folder / "rows.jsonl", list(rows))


def test_answer_field_or_box_and_rows_without_either(tmp_path, caplog):
    rows = [
        {"problem": "Half?", "answer": "\\frac{1}{2}", "solution": "\\boxed{\\frac{1}{2}}"},
        {"problem": "None?", "answer": "", "solution": "\\boxed{}"},
        {"problem": "Two?", "solution": "So \\boxed{2}."},
        {"problem": "Three?", "answer": "3"},
    ]
    with caplog.at_level(logging.WARNING):
        task = MATH(_file(tmp_path, *rows))
    assert isinstance(task, Task)
    assert "left out 1 of 4" in caplog.text
    assert [e.uid[-5:] for e in task.examples()] == ["00000", "00002", "00003"]
    assert [e.reference["answer"] for e in task.examples()] == ["\\frac{1}{2}", "2", "3"]
    assert "\\boxed{}" in task.examples()[0].text
    assert all(task.grade(e, task.reference_completion(e)).is_correct for e in task.examples())


def test_files_are_told_apart_by_name(tmp_path):
    path = _file(tmp_path, {"problem": "Three?", "answer": "3"})
    tasks = [MATH(path), MATH(path, name="more")]
    assert [task.examples()[0].uid for task in tasks] == ["math/test/00000", "more/test/00000"]
    assert tasks[1].examples()[0].task == "more"
    assert tasks_by_name(tasks) == {"math": tasks[0], "more": tasks[1]}
    message = r"val_tasks: .*'math' twice \(MATH of split 'test' and MATH of split 'dev'\)"
    with pytest.raises(ValueError, match=message):
        tasks_by_name([MATH(path), MATH(path, split="dev")], option="val_tasks")


def test_the_names_of_dllm_rl_are_read_as_well(tmp_path):
    rows = [{"question": "Half?", "ground_truth_answer": "\\frac{1}{2}", "level": 3}]
    (example,) = (task := MATH(_file(tmp_path, *rows), split="train")).examples()
    assert (example.uid, example.reference["answer"]) == ("math/train/00000", "\\frac{1}{2}")
    assert example.text.startswith("Half?")
    assert task.grade(example, "\\boxed{\\dfrac{1}{2}}").is_correct
    with pytest.raises(ValueError, match=r"line 1: field 'problem' is missing \(it has: prompt"):
        MATH(_file(tmp_path, {"prompt": "p", "answer": "1"}))


def test_equal_expressions_are_right(tmp_path):
    task = MATH(_file(tmp_path, {"problem": "p", "answer": "\\frac{1}{2}"}))
    example = task.examples()[0]
    assert task.grade(example, "First \\boxed{7}, no: \\boxed{0.5}").is_correct
    assert task.grade(example, "\\boxed{2}").status == "wrong"
    assert task.grade(example, "one half").status == "no_answer"
    assert task.extract(example, "\\boxed{ x }") == "x"


def test_a_file_without_any_answer_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no row has a field 'answer'"):
        MATH(_file(tmp_path, {"problem": "p", "solution": "none"}))


@pytest.mark.skipif(not REAL.exists(), reason="no MATH files here")
def test_math500_references_grade_as_right():
    task = MATH(str(REAL / "math500_test.jsonl.gz"))
    assert len(task.examples()) == 500
    assert all(task.grade(e, task.reference_completion(e)).is_correct for e in task.examples())
