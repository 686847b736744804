r"""GSM8K: grade-school word problems with one number as answer (arXiv 2110.14168).

Graded by exact equality of the final number: the one after the last ``####``, else in the last
``\boxed{}``, else the last of the text. No judge, all 1,319 test questions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from lit_dlm.grading import Verdict
from lit_dlm.grading.answers import extract_number, grade_numeric, text_after_marker
from lit_dlm.tasks.base import PromptExample, Task
from lit_dlm.tasks.sources import Row, pick_rows, read_rows
from lit_dlm.tasks.templates import PromptTemplate

HUB_ID = "openai/gsm8k"
_CALCULATOR = re.compile(r"<<[^>]*>>")
_TEMPLATE = (
    "{{ question }}\n\n"
    "Solve the problem step by step and show your work. End with a line of its own that reads "
    "#### <answer>, where <answer> is the final number only."
)


class GSM8K(Task):
    """The GSM8K questions.

    Args:
        path: a local file or folder with the fields ``question`` and ``answer``, or a hub id.
        split: ``test`` or ``train``.
        limit: most examples to take; all by default.
        seed: shuffles before the limit; the file's order by default.
        template: how a row becomes a prompt: a shipped name, a file or a Jinja text
            (:mod:`lit_dlm.tasks.templates`); the task's own by default.
    """

    name = "gsm8k"
    runs_code = False

    def __init__(
        self,
        path: str | None = None,
        *,
        split: str = "test",
        limit: int | None = None,
        seed: int | None = None,
        template: str | None = None,
    ) -> None:
        self.split = split
        self._template = PromptTemplate(template, default=_TEMPLATE)
        self.template = self._template.given
        rows = read_rows(
            path or HUB_ID, config="main", split=split, required=("question", "answer")
        )
        self._examples = [self._example(row) for row in pick_rows(rows, seed=seed, limit=limit)]

    def _example(self, row: Row) -> PromptExample:
        solution = row.text("answer")
        answer = text_after_marker(solution)
        if answer is None or extract_number(f"#### {answer}") is None:
            raise ValueError(f"{row.origin}: field 'answer' must end in '#### <number>'")
        return PromptExample(
            uid=f"{self.name}/{self.split}/{row.index:05d}",
            task=self.name,
            reference={"answer": answer, "solution": solution},
            **self._template.render({**row.fields, "question": row.text("question").strip()}),
        )

    def examples(self) -> Sequence[PromptExample]:
        """The chosen questions in a stable order."""
        return self._examples

    def reference_completion(self, example: PromptExample) -> str:
        """The data set's own solution, without its calculator annotations."""
        return _CALCULATOR.sub("", example.reference["solution"])

    def extract(self, example: PromptExample, completion: str) -> str | None:
        """The final number of a solution."""
        return extract_number(completion)

    def grade(self, example: PromptExample, completion: str) -> Verdict:
        """Right if the final number equals the reference exactly."""
        return grade_numeric(completion, example.reference["answer"])
