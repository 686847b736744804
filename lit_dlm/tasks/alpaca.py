"""Alpaca-Cleaned: instructions with answers of a larger model, which nothing can grade."""

from __future__ import annotations

from typing import Any

from lit_dlm.grading import Verdict
from lit_dlm.tasks.base import DatasetTask, PromptExample
from lit_dlm.tasks.sources import Row


class Alpaca(DatasetTask):
    """Rows of ``instruction``, ``output`` and, where there is something to work on, ``input``."""

    name = "alpaca"
    is_graded = False
    hub_id = "yahma/alpaca-cleaned"
    split = "train"
    required_fields = ("instruction", "output")

    def __init__(
        self, path: str | None = None, *, template: str = "tracelock-alpaca", **options: Any
    ) -> None:
        super().__init__(path, template=template, **options)

    def _example(self, row: Row) -> PromptExample:
        return self._prompt(
            row,
            f"{row.index:05d}",
            row.text("instruction").strip(),
            {"output": row.text("output")},
            input=row.text("input").strip() if row.fields.get("input") else "",
        )

    def reference_completion(self, example: PromptExample) -> str:
        return str(example.reference["output"])

    def extract(self, example: PromptExample, completion: str) -> str | None:
        return completion.strip() or None

    def grade(self, example: PromptExample, completion: str) -> Verdict:
        raise ValueError(f"{example.uid}: the task {self.name!r} has no grader")
