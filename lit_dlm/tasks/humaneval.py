"""HumanEval (arXiv 2107.03374) and HumanEval+ (arXiv 2305.01210): complete a Python function."""

from __future__ import annotations

from lit_dlm.grading.plus import Rule
from lit_dlm.tasks.base import CodeTask, PromptExample
from lit_dlm.tasks.plus import PlusTask, problem_number
from lit_dlm.tasks.sources import Row

_TEMPLATE = (
    "Complete this Python function. Answer with the whole function in one fenced python block."
    "\n\n```python\n{{ question | trim }}\n```"
)


class HumanEval(CodeTask):
    """The 164 problems of HumanEval.

    With a template that shows ``test``, such as ``tracelock-code``, scores are not HumanEval's.
    """

    name = "humaneval"
    hub_id = "openai/openai_humaneval"
    required_fields = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
    own_template = _TEMPLATE

    def _example(self, row: Row) -> PromptExample:
        stub = row.text("prompt")
        reference = {
            "task_id": row.text("task_id"),
            "entry_point": row.text("entry_point"),
            "check": row.text("test"),
            "stub": stub,
            "solution": stub + row.text("canonical_solution"),
        }
        return self._prompt(row, problem_number(row), stub, reference)


class HumanEvalPlus(PlusTask):
    """HumanEval with about 80 times as many tests; see :class:`PlusTask`."""

    name = "humaneval+"
    own_template = _TEMPLATE

    def _parts(self, row: Row) -> tuple[str, str, str]:
        stub = row.text("prompt")
        return stub, stub, stub + row.text("canonical_solution")

    def _rule(self, entry_point: str) -> tuple[Rule, None]:
        # Any root is right. EvalPlus 0.3.1 judges it so, too, but then forgets to note it down, and
        # no solution of HumanEval/32 can pass there.
        return ("root" if entry_point == "find_zero" else "close"), None
