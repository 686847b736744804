"""MATH: competition problems with an expression as answer (arXiv 2103.03874)."""

from __future__ import annotations

import logging
from typing import Any

from lit_dlm.grading.answers import last_boxed
from lit_dlm.tasks.base import DatasetTask, PromptExample
from lit_dlm.tasks.sources import Row

logger = logging.getLogger(__name__)


class MATH(DatasetTask):
    """Problems of the MATH family: MATH-500, or any file of the same form, such as AIME's.

    A row has ``problem`` and ``answer`` or ``solution`` (whose last box is then the answer), or
    dLLM-RL's names ``question`` and ``ground_truth_answer``.
    """

    name = "math"
    grading = "math"
    hub_id = "HuggingFaceH4/MATH-500"
    own_template = (
        "{{ question }}\n\n"
        "Reason step by step, and write your final answer, and nothing else, inside \\boxed{}."
    )

    def _usable(self, rows: list[Row], split: str) -> list[Row]:
        for row in rows:
            has_problem = "problem" in row.fields or "question" in row.fields
            row.expect(has_problem, "a field 'problem'", list(row.fields))
        usable = [row for row in rows if self._answer(row)]
        # Left out and not refused: in a long file of others, a few rows may lack an answer.
        if dropped := len(rows) - len(usable):
            logger.warning("left out %d of %d problems without an answer", dropped, len(rows))
        wanted = "a field 'answer' or a boxed solution in at least one row"
        rows[0].expect(bool(usable), wanted, rows[0].fields)
        return usable

    @staticmethod
    def _answer(row: Row) -> str:
        for name in ("answer", "ground_truth_answer"):
            if isinstance(number := row.fields.get(name), int):  # also 0, which is false
                return str(number)
            if row.fields.get(name):
                return row.text(name).strip()
        solution = row.text("solution") if "solution" in row.fields else ""
        return (last_boxed(solution) or "").strip()

    def _example(self, row: Row) -> PromptExample:
        reference: dict[str, Any] = {
            "answer": self._answer(row),
            "solution": row.fields.get("solution") or "",
            **{key: row.fields[key] for key in ("subject", "level") if key in row.fields},
        }
        problem = row.text("problem" if "problem" in row.fields else "question")
        return self._prompt(row, f"{row.index:05d}", problem.strip(), reference)

    def reference_completion(self, example: PromptExample) -> str:
        answer, solution = example.reference["answer"], example.reference["solution"]
        # A solution may box a step as well, or its answer in other words than the field has.
        return solution if last_boxed(solution) == answer else f"\\boxed{{{answer}}}"
