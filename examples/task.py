"""A task of your own: prompts, answer extraction and grading, in one class.

In the folder of this file, add these lines to an experiment for ``lit-dlm predict``::

    data:
      class_path: PromptDataModule
      init_args:
        tasks:
        - {class_path: task.Totals, init_args: {num_examples: 4}}
        response_length: 32

RL takes the same ``tasks``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from lit_dlm.grading import Verdict
from lit_dlm.tasks import PromptExample, Task


class Totals(Task):
    """Word problems with one addition.

    Args:
        num_examples: number of problems.
    """

    name = "totals"

    def __init__(self, num_examples: int = 100) -> None:
        self.num_examples = num_examples

    def examples(self) -> Sequence[PromptExample]:
        """Problem ``i`` adds ``i mod 7 + 2`` to ``i + 3``."""
        found = []
        for i in range(self.num_examples):
            a, b = i + 3, i % 7 + 2
            text = f"Tom has {a} pens, finds {b}. How many pens?"
            uid = f"{self.name}/{self.split}/{i:05d}"
            reference = {"answer": a + b}
            found.append(PromptExample(uid=uid, task=self.name, text=text, reference=reference))
        return found

    def reference_completion(self, example: PromptExample) -> str:
        """Returns the answer alone."""
        return f"#### {example.reference['answer']}"

    def extract(self, example: PromptExample, completion: str) -> str | None:
        """Returns the number after the last ``####``."""
        found = re.findall(r"####\s*(-?\d+)", completion)
        return found[-1] if found else None

    def grade(self, example: PromptExample, completion: str) -> Verdict:
        """Grades a completion as right if its number is the sum."""
        answer = self.extract(example, completion)
        if answer is None:
            return Verdict(status="no_answer")
        is_right = int(answer) == example.reference["answer"]
        return Verdict(status="right" if is_right else "wrong", answer=answer)
