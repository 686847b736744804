"""HumanEval (arXiv 2107.03374) and HumanEval+ (arXiv 2305.01210): complete a Python function.

HumanEval is graded by the data set's own ``check(candidate)``, HumanEval+ by its inputs and the
reference solution. The two scores are different things and have different task names.
"""

from __future__ import annotations

from collections.abc import Sequence

from lit_dlm.grading import SandboxLimits, Verdict
from lit_dlm.grading.code import extract_code, grade_by_tests, python_block
from lit_dlm.grading.plus import PlusProblem
from lit_dlm.tasks.base import PromptExample, Task
from lit_dlm.tasks.plus import PlusTask, problem_number
from lit_dlm.tasks.sources import Row, pick_rows, read_rows
from lit_dlm.tasks.templates import PromptTemplate

HUB_ID = "openai/openai_humaneval"
_REFERENCE_FIELDS = ("prompt", "entry_point", "canonical_solution", "test")
_TEMPLATE = (
    "Complete this Python function. Answer with the whole function in one fenced python block."
    "\n\n```python\n{{ question | trim }}\n```"
)


class HumanEval(Task):
    """The 164 problems of HumanEval.

    Args:
        path: a local file or folder with the fields ``task_id``, ``prompt``, ``entry_point``,
            ``canonical_solution`` and ``test``, or a hub id.
        split: name of the split.
        limit: most examples to take; all by default.
        seed: shuffles before the limit; the file's order by default.
        allow_code_execution: must be true to grade: it runs model-written code in the sandbox.
        limits: what one sample may use.
        template: how a row becomes a prompt: a shipped name, a file or a Jinja text
            (:mod:`lit_dlm.tasks.templates`); the task's own by default. With a template that shows
            ``test``, such as ``tracelock-code``, scores are not HumanEval scores.
    """

    name = "humaneval"
    runs_code = True

    def __init__(
        self,
        path: str | None = None,
        *,
        split: str = "test",
        limit: int | None = None,
        seed: int | None = None,
        allow_code_execution: bool = False,
        limits: SandboxLimits | None = None,
        template: str | None = None,
    ) -> None:
        self.split = split
        self._template = PromptTemplate(template, default=_TEMPLATE)
        self.template = self._template.given
        self.allow_code_execution = allow_code_execution
        self._limits = limits
        rows = read_rows(path or HUB_ID, split=split, required=("task_id", *_REFERENCE_FIELDS))
        self._examples = [self._example(row) for row in pick_rows(rows, seed=seed, limit=limit)]

    def _example(self, row: Row) -> PromptExample:
        reference = {name: row.text(name) for name in _REFERENCE_FIELDS}
        return PromptExample(
            uid=f"{self.name}/{self.split}/{problem_number(row)}",
            task=self.name,
            reference={**reference, "task_id": row.text("task_id")},
            **self._template.render({**row.fields, "question": reference["prompt"]}),
        )

    def examples(self) -> Sequence[PromptExample]:
        """The chosen problems in a stable order."""
        return self._examples

    def reference_completion(self, example: PromptExample) -> str:
        """The canonical solution as a whole function in a fenced block."""
        return python_block(example.reference["prompt"] + example.reference["canonical_solution"])

    def extract(self, example: PromptExample, completion: str) -> str | None:
        """The module that is run: the prompt's stub and the code of the completion."""
        reference = example.reference
        answer = example.answer_start + completion
        return extract_code(answer, reference["entry_point"], stub=reference["prompt"]).code

    def grade(self, example: PromptExample, completion: str) -> Verdict:
        """Runs the problem's tests against the completion, in the sandbox."""
        reference = example.reference
        return grade_by_tests(
            example.answer_start + completion,
            reference["test"],
            reference["entry_point"],
            stub=reference["prompt"],
            limits=self._limits,
            allow_code_execution=self.allow_code_execution,
        )


class HumanEvalPlus(PlusTask):
    """HumanEval with about 80 times as many tests.

    Args:
        path: a local ``HumanEvalPlus.jsonl`` or ``.jsonl.gz`` of the EvalPlus release.
        split: a label, part of every uid.
        limit: most examples to take; all by default.
        seed: shuffles before the limit; the file's order by default.
        allow_code_execution: must be true to grade: it runs model-written code in the sandbox.
        cache_dir: folder for expected outputs, private to its owner; memory only by default.
        base_only: grades by the original inputs alone.
        template: how a row becomes a prompt: a shipped name, a file or a Jinja text
            (:mod:`lit_dlm.tasks.templates`); the task's own by default.
    """

    name = "humaneval+"
    _file = "HumanEvalPlus.jsonl.gz"
    _default = _TEMPLATE

    def _question(self, row: Row) -> str:
        return row.text("prompt")

    def _solution(self, row: Row) -> str:
        return row.text("prompt") + row.text("canonical_solution")

    def _stub(self, row: Row) -> str:
        return row.text("prompt")

    def problem(self, example: PromptExample) -> PlusProblem:
        """The inputs and the reference solution in the form the grader takes."""
        reference = example.reference
        return self._problem(
            example,
            reference["base_input"],
            reference["plus_input"],
            rule="root" if reference["entry_point"] == "find_zero" else "close",
        )
