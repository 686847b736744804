"""Prompts of your own, such as lines of ``{"id": ..., "prompt": ..., "answer": ...}``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from lit_dlm.grading import Verdict
from lit_dlm.grading.answers import (
    extract_math,
    extract_number,
    grade_exact,
    grade_math,
    grade_numeric,
    parse_number,
)
from lit_dlm.tasks.base import DatasetTask, PromptExample
from lit_dlm.tasks.conversations import conversation
from lit_dlm.tasks.sources import Row


class PromptsFile(DatasetTask):
    """Prompts passed to the model as they are unless a template is given.

    What a row may hold says :mod:`lit_dlm.tasks.conversations`; ``ResponsesFile`` takes the same.
    An ``id``, where a row has one, is unique and part of the uid; else the row's number is.

    Args:
        path: a file, a folder with a file for each split, or a data set on the hub
            (:func:`~lit_dlm.tasks.sources.read_rows`); to grade, with answers.
        config: configuration on the hub.
        streamed: reads a data set on the hub row by row up to the limit, instead of fetching it.
        grading: how a completion is judged: ``none`` never calls anything right or wrong,
            ``exact`` compares the whole text, ``numeric`` the final number, ``math`` the boxed
            expression.
        name: name of the task in results and uids, to tell several files apart.
    """

    def __init__(
        self,
        path: str,
        *,
        grading: Literal["none", "exact", "numeric", "math"] = "none",
        name: str = "prompts",
        config: str | None = None,
        streamed: bool = False,
        **options: Any,
    ) -> None:
        if grading not in ("none", "exact", "numeric", "math"):
            raise ValueError(f"grading: expected none, exact, numeric or math, got {grading!r}")
        self.name = name
        self.grading = grading
        self.is_graded = grading != "none"
        self.hub_config = config
        self.streamed = streamed
        super().__init__(path, **options)

    def _usable(self, rows: list[Row]) -> list[Row]:
        seen: dict[str, str] = {}
        for row in rows:
            key = self._key(row)
            if key in seen:
                raise ValueError(f"{row.origin}: id {key!r} is taken by {seen[key]}")
            seen[key] = row.origin
        return rows

    @staticmethod
    def _key(row: Row) -> str:
        value = row.fields.get("id", f"{row.index:06d}")
        if not isinstance(value, str | int) or isinstance(value, bool) or str(value).strip() == "":
            raise ValueError(f"{row.origin}: field 'id' must be a text or an integer")
        return str(value)

    def _example(self, row: Row) -> PromptExample:
        turns, answer = conversation(row, needs_answer=self.is_graded, short=True)
        reference = {}
        if self.is_graded:
            assert answer is not None
            if self.grading == "numeric" and parse_number(answer) is None:
                raise ValueError(f"{row.origin}: the answer must hold a number, got {answer!r}")
            reference["answer"] = answer
        example = self._prompt(row, self._key(row), turns[-1]["content"], reference)
        return replace(example, history=turns[:-1])

    def reference_completion(self, example: PromptExample) -> str:
        """The answer in the form that grades as right.

        Raises:
            ValueError: If the file is not graded.
        """
        answer = self._answer(example)
        return f"\\boxed{{{answer}}}" if self.grading == "math" else answer

    def extract(self, example: PromptExample, completion: str) -> str | None:
        """What is compared: the number, the box, or the whole text."""
        if self.grading == "numeric":
            return extract_number(completion)
        if self.grading == "math":
            return extract_math(completion)
        return completion.strip() or None

    def grade(self, example: PromptExample, completion: str) -> Verdict:
        """Judges by the chosen rule.

        Raises:
            ValueError: the file is not graded; ask ``is_graded`` first.
        """
        answer = self._answer(example)
        if self.grading == "numeric":
            return grade_numeric(completion, answer)
        if self.grading == "math":
            return grade_math(completion, answer)
        return grade_exact(completion, answer)

    def _answer(self, example: PromptExample) -> str:
        if not self.is_graded:
            raise ValueError(
                f"grading: the prompts of task {self.name!r} have no grader (grading: none)"
            )
        return str(example.reference["answer"])
