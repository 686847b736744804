"""Alpaca: prompts with and without an input, and no grade."""

from __future__ import annotations

from pathlib import Path

import pytest

from lit_dlm.tasks import Alpaca
from tests.e2e.runs import write_jsonl


def alpaca(folder: Path, *rows: dict) -> Alpaca:
    write_jsonl(folder / "train.jsonl", list(rows))
    return Alpaca(str(folder))


def test_prompts_show_an_input_where_there_is_one(tmp_path: Path):
    task = alpaca(
        tmp_path,
        {"instruction": "Translate. ", "input": " Hund\n", "output": "dog"},
        {"instruction": "Say hi.", "input": "", "output": "hi"},
        {"instruction": "Say ho.", "output": "ho"},
    )
    texts = [example.text for example in task.examples()]
    assert texts == ["Translate.\n\nInput:\nHund", "Say hi.", "Say ho."]
    assert task.examples()[0].uid == "alpaca/train/00000"
    assert task.reference_completion(task.examples()[0]) == "dog"


def test_nothing_judges_an_answer(tmp_path: Path):
    task = alpaca(tmp_path, {"instruction": "Say hi.", "output": "hi"})
    assert not task.is_graded
    with pytest.raises(ValueError, match=r"alpaca/train/00000: .*has no grader"):
        task.grade(task.examples()[0], "hi")
