"""Prompts of your own, such as lines of ``{"id": ..., "prompt": ..., "answer": ...}``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from lit_dlm.grading import Verdict
from lit_dlm.grading.answers import (
    extract_math,
    extract_number,
    grade_exact,
    grade_math,
    grade_numeric,
    grade_relaxed,
    grade_vqa,
    parse_number,
)
from lit_dlm.tasks.base import DatasetTask, PromptExample
from lit_dlm.tasks.conversations import conversation
from lit_dlm.tasks.sources import Row

_GRADERS: dict[str, Callable[[str, str], Verdict]] = {
    "exact": grade_exact,
    "numeric": grade_numeric,
    "math": grade_math,
    "chartqa": grade_relaxed,
}


class PromptsFile(DatasetTask):
    """Prompts passed to the model as they are unless a template is given.

    What a row may hold says :mod:`lit_dlm.tasks.conversations`; ``ResponsesFile`` takes the same.
    An ``id``, where a row has one, is unique and part of the uid; else the row's number is.

    Args:
        path: a file, a folder with a file for each split, or a data set on the hub
            (:func:`~lit_dlm.tasks.sources.read_rows`); to grade, with answers.
        grading: how a completion is judged: ``none`` never calls anything right or wrong,
            ``exact`` compares the whole text, ``numeric`` the final number, ``math`` the boxed
            expression, ``vqa`` a short answer with the row's ``answers`` of several people (texts,
            or objects with an ``answer``), ``chartqa`` a short answer that may be off by 5 %.
    """

    name = "prompts"

    def __init__(
        self,
        path: str,
        *,
        grading: Literal["none", "exact", "numeric", "math", "vqa", "chartqa"] = "none",
        **options: Any,
    ) -> None:
        self.grading = grading
        self.is_graded = grading != "none"
        self.is_soft = grading == "vqa"
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
        by_people = self.grading == "vqa"
        turns, answer = conversation(row, needs_answer=self.is_graded and not by_people, short=True)
        reference: dict[str, Any] = {}
        if by_people:
            reference["answers"] = _answers(row)
        elif self.is_graded:
            assert answer is not None
            if self.grading == "numeric" and parse_number(answer) is None:
                raise ValueError(f"{row.origin}: the answer must hold a number, got {answer!r}")
            reference["answer"] = answer
        example = self._prompt(row, self._key(row), turns[-1]["content"], reference)
        return replace(example, history=turns[:-1])

    def reference_completion(self, example: PromptExample) -> str:
        answer = self._answer(example)
        return f"\\boxed{{{answer}}}" if self.grading == "math" else answer

    def extract(self, example: PromptExample, completion: str) -> str | None:
        if self.grading == "numeric":
            return extract_number(completion)
        if self.grading == "math":
            return extract_math(completion)
        return completion.strip() or None

    def grade(self, example: PromptExample, completion: str) -> Verdict:
        if self.grading == "vqa":
            return grade_vqa(completion, example.reference["answers"])
        answer = self._answer(example)
        return _GRADERS[self.grading](completion, answer)

    def _answer(self, example: PromptExample) -> str:
        if not self.is_graded:
            raise ValueError(
                f"grading: the prompts of task {self.name!r} have no grader (grading: none)"
            )
        if self.grading == "vqa":
            answers = example.reference["answers"]
            return str(max(answers, key=answers.count))
        return str(example.reference["answer"])


def _answers(row: Row) -> list[str]:
    given = row.fields.get("answers")
    found = [one.get("answer") if isinstance(one, dict) else one for one in given or []]
    texts = [one for one in found if isinstance(one, str)]
    if not texts or len(texts) < len(found):
        raise ValueError(f"{row.origin}: field 'answers' must be a list of texts")
    return texts
