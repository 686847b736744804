"""The task table."""

from __future__ import annotations

import json

import pytest

from lit_dlm.tasks.base import Task
from lit_dlm.tasks.table import TASKS, build_task


def test_every_class_bears_the_name_of_its_entry():
    for name, kind in TASKS.items():
        if name != "prompts":  # that one is named by its user
            assert kind.name == name
        assert isinstance(kind.runs_code, bool)


def test_build_task_passes_settings_on(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"id": 1, "prompt": "x"}))
    task = build_task("prompts", path=str(path), split="dev")
    assert isinstance(task, Task)
    assert task.examples()[0].uid == "prompts/dev/1"


def test_unknown_names_get_the_nearest_one():
    with pytest.raises(ValueError, match="unknown task 'gms8k', nearest 'gsm8k'"):
        build_task("gms8k")
    with pytest.raises(ValueError, match=r"unknown task 'zzz' \(known: word_problems"):
        build_task("zzz")
    with pytest.raises(ValueError, match="task 'gsm8k': unknown setting 'limits', nearest 'limit'"):
        build_task("gsm8k", limits=3)
