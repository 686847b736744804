"""Alpaca-Cleaned: instructions with answers of a larger model, which nothing can grade."""

from __future__ import annotations

from collections.abc import Sequence

from lit_dlm.grading import Verdict
from lit_dlm.tasks.base import PromptExample, Task
from lit_dlm.tasks.sources import Row, pick_rows, read_rows
from lit_dlm.tasks.templates import PromptTemplate

HUB_ID = "yahma/alpaca-cleaned"


class Alpaca(Task):
    """Instructions in the form of Alpaca.

    Args:
        path: a local file or folder with the fields ``instruction`` and ``output`` and, where there
            is something to work on, ``input``; or a hub id.
        split: name of the split.
        limit: most examples to take; all by default.
        seed: shuffles before the limit; the file's order by default.
        template: how a row becomes a prompt: a shipped name, a file or a Jinja text
            (:mod:`lit_dlm.tasks.templates`).
    """

    name = "alpaca"
    runs_code = False

    def __init__(
        self,
        path: str | None = None,
        *,
        split: str = "train",
        limit: int | None = None,
        seed: int | None = None,
        template: str = "tracelock-alpaca",
    ) -> None:
        self.split = split
        self._template = PromptTemplate(template)
        self.template = self._template.given
        rows = read_rows(path or HUB_ID, split=split, required=("instruction", "output"))
        self._examples = [self._example(row) for row in pick_rows(rows, seed=seed, limit=limit)]

    def _example(self, row: Row) -> PromptExample:
        question = row.text("instruction").strip()
        given = row.text("input").strip() if row.fields.get("input") else ""
        return PromptExample(
            uid=f"{self.name}/{self.split}/{row.index:05d}",
            task=self.name,
            reference={"output": row.text("output")},
            **self._template.render({**row.fields, "question": question, "input": given}),
        )

    @property
    def is_graded(self) -> bool:
        """Completions cannot be judged."""
        return False

    def examples(self) -> Sequence[PromptExample]:
        """The chosen instructions in a stable order."""
        return self._examples

    def reference_completion(self, example: PromptExample) -> str:
        """The data set's answer."""
        return str(example.reference["output"])

    def extract(self, example: PromptExample, completion: str) -> str | None:
        """The whole text."""
        return completion.strip() or None

    def grade(self, example: PromptExample, completion: str) -> Verdict:
        """Refuses to judge; ask ``is_graded`` first.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{example.uid}: the task {self.name!r} has no grader")
