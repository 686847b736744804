r"""MATH: competition problems with an expression as answer (arXiv 2103.03874).

The default is MATH-500. Graded by math-verify on the content of the last ``\boxed{}``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from lit_dlm.grading import Verdict
from lit_dlm.grading.answers import extract_math, grade_math, last_boxed
from lit_dlm.tasks.base import PromptExample, Task
from lit_dlm.tasks.sources import Row, pick_rows, read_rows
from lit_dlm.tasks.templates import PromptTemplate

logger = logging.getLogger(__name__)

HUB_ID = "HuggingFaceH4/MATH-500"
_TEMPLATE = (
    "{{ question }}\n\n"
    "Reason step by step, and write your final answer, and nothing else, inside \\boxed{}."
)


class MATH(Task):
    """Problems of the MATH family: MATH-500, or any file of the same form.

    Args:
        path: a local file or folder with the fields ``problem`` and ``answer`` or ``solution``
            (whose last box is then the answer), or with dLLM-RL's names ``question`` and
            ``ground_truth_answer``; or a hub id.
        split: name of the split.
        limit: most examples to take; all by default.
        seed: shuffles before the limit; the file's order by default.
        name: name of the task in results and uids, to tell several files apart.
        template: how a row becomes a prompt: a shipped name, a file or a Jinja text
            (:mod:`lit_dlm.tasks.templates`); the task's own by default.
    """

    name = "math"
    runs_code = False

    def __init__(
        self,
        path: str | None = None,
        *,
        split: str = "test",
        limit: int | None = None,
        seed: int | None = None,
        name: str = "math",
        template: str | None = None,
    ) -> None:
        self.name = name
        self._template = PromptTemplate(template, default=_TEMPLATE)
        self.template = self._template.given
        self.split = split
        rows = read_rows(path or HUB_ID, split=split, required=())
        for row in rows:
            if "problem" not in row.fields and "question" not in row.fields:
                present = ", ".join(list(row.fields)[:8])
                raise ValueError(f"{row.origin}: field 'problem' is missing (it has: {present})")
        usable = [row for row in rows if self._answer(row)]
        if len(usable) < len(rows):
            dropped = len(rows) - len(usable)
            logger.warning("left out %d of %d problems without an answer", dropped, len(rows))
        if not usable:
            raise ValueError(f"{rows[0].origin}: no row has a field 'answer' or a boxed solution")
        self._examples = [self._example(row) for row in pick_rows(usable, seed=seed, limit=limit)]

    @staticmethod
    def _answer(row: Row) -> str:
        for name in ("answer", "ground_truth_answer"):
            if row.fields.get(name):
                return row.text(name).strip()
        solution = row.text("solution") if "solution" in row.fields else ""
        return (last_boxed(solution) or "").strip()

    def _example(self, row: Row) -> PromptExample:
        kept: dict[str, Any] = {
            key: row.fields[key] for key in ("subject", "level") if key in row.fields
        }
        problem = row.text("problem" if "problem" in row.fields else "question")
        return PromptExample(
            uid=f"{self.name}/{self.split}/{row.index:05d}",
            task=self.name,
            reference={
                "answer": self._answer(row),
                "solution": row.fields.get("solution") or "",
                **kept,
            },
            **self._template.render({**row.fields, "question": problem.strip()}),
        )

    def examples(self) -> Sequence[PromptExample]:
        """The chosen problems in a stable order."""
        return self._examples

    def reference_completion(self, example: PromptExample) -> str:
        """The data set's solution; with only an answer given, that answer in a box."""
        answer, solution = example.reference["answer"], example.reference["solution"]
        return solution if last_boxed(solution) == answer else f"\\boxed{{{answer}}}"

    def extract(self, example: PromptExample, completion: str) -> str | None:
        """The content of the last box."""
        return extract_math(completion)

    def grade(self, example: PromptExample, completion: str) -> Verdict:
        """Right if the boxed expression equals the reference mathematically."""
        return grade_math(completion, example.reference["answer"])
