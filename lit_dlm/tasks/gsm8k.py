"""GSM8K: grade-school word problems with one number as answer (arXiv 2110.14168)."""

from __future__ import annotations

import re

from lit_dlm.grading.answers import extract_number, text_after_marker
from lit_dlm.tasks.base import DatasetTask, PromptExample
from lit_dlm.tasks.sources import Row

_CALCULATOR = re.compile(r"<<[^>]*>>")


class GSM8K(DatasetTask):
    """The GSM8K questions, of the split ``test`` or ``train``."""

    name = "gsm8k"
    grading = "numeric"
    hub_id = "openai/gsm8k"
    hub_config = "main"
    required_fields = ("question", "answer")
    own_template = (
        "{{ question }}\n\n"
        "Solve the problem step by step and show your work. End with a line of its own that reads "
        "#### <answer>, where <answer> is the final number only."
    )

    def _example(self, row: Row) -> PromptExample:
        solution = row.text("answer")
        answer = text_after_marker(solution)
        is_number = answer is not None and extract_number(f"#### {answer}") is not None
        row.expect(is_number, "'#### <number>' at the end of field 'answer'", solution)
        reference = {"answer": answer, "solution": solution}
        return self._prompt(row, f"{row.index:05d}", row.text("question").strip(), reference)

    def reference_completion(self, example: PromptExample) -> str:
        # The release's annotations for a calculator, <<2+3=5>>, are no text that anybody writes.
        return _CALCULATOR.sub("", example.reference["solution"])
