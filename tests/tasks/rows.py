"""Tasks from rows that a test writes down, and from the data sets that lie beside the checkout."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lit_dlm.grading import Verdict
from lit_dlm.tasks import PromptExample, Task
from tests.e2e.runs import write_jsonl

DATA = Path(__file__).parents[2].parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.exists(), reason="no data sets here")


def task_of(kind: Any, folder: Path, *rows: dict[str, Any], **options: Any) -> Any:
    return kind(write_jsonl(folder / "rows.jsonl", list(rows)), **options)


def only(kind: Any, folder: Path, row: dict[str, Any], **options: Any) -> tuple[Any, PromptExample]:
    """A task of one row, and its example."""
    task = task_of(kind, folder, row, **options)
    (example,) = task.examples()
    return task, example


def grades(task: Task, pairs: Iterable[tuple[PromptExample, str]]) -> list[Verdict]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda pair: task.grade(*pair), pairs))


def references(task: Task) -> list[tuple[PromptExample, str]]:
    return [(example, task.reference_completion(example)) for example in task.examples()]
