"""Alpaca-Cleaned: instructions with answers by a larger model; responses are not graded."""

from __future__ import annotations

from typing import Any

from lit_dlm.tasks.base import DatasetTask, PromptExample
from lit_dlm.tasks.sources import Row


class Alpaca(DatasetTask):
    """Rows with ``instruction``, ``output`` and, where there is a text to work on, ``input``."""

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
        below = row.text("input").strip() if row.fields.get("input") else ""
        reference = {"answer": row.text("output")}
        question = row.text("instruction").strip()
        return self._prompt(row, f"{row.index:05d}", question, reference, input=below)
