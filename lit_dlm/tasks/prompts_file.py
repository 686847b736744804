"""Prompts of your own, one JSON object a line: ``{"id": ..., "prompt": ..., "answer": ...}``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lit_dlm.grading import Verdict
from lit_dlm.grading.answers import (
    extract_math,
    extract_number,
    grade_exact,
    grade_math,
    grade_numeric,
    parse_number,
)
from lit_dlm.tasks.base import PromptExample, Task
from lit_dlm.tasks.sources import Row, pick_rows, read_rows
from lit_dlm.tasks.templates import PromptTemplate


class PromptsFile(Task):
    """Prompts from a file, passed to the model as they are unless a template is given.

    Args:
        path: a local file with the fields ``id`` (unique), ``prompt`` and, to grade, ``answer``.
        grading: how a completion is judged: ``none`` never calls anything right or wrong,
            ``exact`` compares the whole text, ``numeric`` the final number, ``math`` the boxed
            expression.
        split: a label, part of every uid.
        limit: most prompts to take; all by default.
        seed: shuffles before the limit; the file's order by default.
        name: name of the task in results and uids, to tell several files apart.
        template: how a row becomes a prompt: a shipped name, a file or a Jinja text
            (:mod:`lit_dlm.tasks.templates`); the task's own by default.
    """

    runs_code = False

    def __init__(
        self,
        path: str,
        *,
        grading: Literal["none", "exact", "numeric", "math"] = "none",
        split: str = "test",
        limit: int | None = None,
        seed: int | None = None,
        name: str = "prompts",
        template: str | None = None,
    ) -> None:
        self._template = PromptTemplate(template)
        self.template = self._template.given
        if grading not in ("none", "exact", "numeric", "math"):
            raise ValueError(f"grading: expected none, exact, numeric or math, got {grading!r}")
        self.name = name
        self.split = split
        self.grading = grading
        required = ("id", "prompt") if grading == "none" else ("id", "prompt", "answer")
        rows = read_rows(path, split=split, required=required)
        seen: dict[str, str] = {}
        for row in rows:
            key = self._key(row)
            if key in seen:
                raise ValueError(f"{row.origin}: id {key!r} is taken by {seen[key]}")
            seen[key] = row.origin
        self._examples = [self._example(row) for row in pick_rows(rows, seed=seed, limit=limit)]

    @property
    def is_graded(self) -> bool:
        """Whether completions can be judged."""
        return self.grading != "none"

    @staticmethod
    def _key(row: Row) -> str:
        value = row.fields["id"]
        if not isinstance(value, str | int) or isinstance(value, bool) or str(value).strip() == "":
            raise ValueError(f"{row.origin}: field 'id' must be a text or an integer")
        return str(value)

    def _example(self, row: Row) -> PromptExample:
        prompt = row.text("prompt")
        if not prompt.strip():
            raise ValueError(f"{row.origin}: field 'prompt' must not be empty")
        reference = {}
        if self.is_graded:
            answer = row.fields["answer"]
            if isinstance(answer, bool) or not isinstance(answer, str | int | float):
                raise ValueError(f"{row.origin}: field 'answer' must be a text or a number")
            if self.grading == "numeric" and parse_number(str(answer)) is None:
                raise ValueError(f"{row.origin}: field 'answer' must hold a number")
            reference["answer"] = str(answer)
        return PromptExample(
            uid=f"{self.name}/{self.split}/{self._key(row)}",
            task=self.name,
            reference=reference,
            **self._template.render({**row.fields, "question": prompt}),
        )

    def examples(self) -> Sequence[PromptExample]:
        """The chosen prompts in a stable order."""
        return self._examples

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
        """Judges one completion by the chosen rule.

        Raises:
            ValueError: If the file is not graded; ask ``is_graded`` first.
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
