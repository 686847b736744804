"""Prompts of your own, such as lines of ``{"id": ..., "prompt": ..., "answer": ...}``."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Literal

from lit_dlm.grading.answers import parse_number
from lit_dlm.system.options import refuse
from lit_dlm.tasks.base import DatasetTask, PromptExample
from lit_dlm.tasks.conversations import conversation
from lit_dlm.tasks.sources import Row


class PromptsFile(DatasetTask):
    """Your own prompts, passed to the model unchanged unless a template is given.

    :mod:`lit_dlm.tasks.conversations` says what a row may hold; ``ResponsesFile`` takes the same.
    If a row has an ``id``, it must be unique and becomes part of the uid, as the row's number does
    otherwise. It must not contain ``@`` or end in ``#1`` or another such number.

    Args:
        path: a file, a folder with a file for each split, or a data set on the hub
            (:func:`~lit_dlm.tasks.sources.read_rows`); with answers if they are graded.
        grading: how a completion is judged: ``none`` never calls anything right or wrong,
            ``exact`` compares the whole text, ``numeric`` the final number, ``math`` the boxed
            expression.
    """

    name = "prompts"

    def __init__(
        self,
        path: str,
        *,
        grading: Literal["none", "exact", "numeric", "math"] = "none",
        **options: Any,
    ) -> None:
        self.grading = grading
        self.is_graded = grading != "none"
        super().__init__(path, **options)

    def _usable(self, rows: list[Row], split: str) -> list[Row]:
        seen: dict[str, str] = {}
        for row in rows:
            key = self._key(row)
            # Uids are keys of records and results: of two equal ones, one would never be decoded.
            row.expect(key not in seen, f"an id other than that of {seen.get(key)}", key)
            seen[key] = row.origin
        return rows

    @staticmethod
    def _key(row: Row) -> str:
        if "id" not in row.fields:
            return f"{row.index:06d}"
        key = str(row.get("id", (str, int), "a text or an integer"))
        row.expect(bool(key.strip()), "a text or an integer in field 'id'", key)
        # Uids get such endings: numbers of responses and names of decoders.
        is_free = "@" not in key and not re.search(r"#\d+$", key)
        row.expect(is_free, "no @ and no #number at the end of field 'id'", key)
        return key

    def _example(self, row: Row) -> PromptExample:
        turns, answer = conversation(row, needs_answer=self.is_graded, short=True)
        reference: dict[str, Any] = {}
        if self.is_graded:
            assert answer is not None
            # Else every response would fail in grading, after it was decoded.
            is_right = self.grading != "numeric" or parse_number(answer) is not None
            row.expect(is_right, "an answer with a number", answer)
            reference["answer"] = answer
        # The template is for the last turn: earlier ones have been said already.
        example = self._prompt(row, self._key(row), turns[-1]["content"], reference)
        return replace(example, history=turns[:-1])

    def reference_completion(self, example: PromptExample) -> str:
        if self.grading == "none":
            wanted = "a task with grading, whose answers are its references"
            hint = "; ResponsesFile takes answers without it"
            refuse(example.uid, wanted, "grading: none", hint)
        answer = example.reference["answer"]
        return f"\\boxed{{{answer}}}" if self.grading == "math" else answer
