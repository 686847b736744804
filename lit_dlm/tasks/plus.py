"""What HumanEval+ and MBPP+ share: EvalPlus (arXiv 2305.01210).

A file of the release gives many inputs, and the reference solution says what they should return.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from lit_dlm.grading import Verdict
from lit_dlm.grading.code import ExtractedCode, extract_code, python_block, ungradable
from lit_dlm.grading.plus import PlusGrader, PlusProblem, Rule
from lit_dlm.tasks.base import DatasetTask, PromptExample
from lit_dlm.tasks.sources import Row


class PlusTask(DatasetTask):
    """Base of the EvalPlus tasks; a subclass says how a row becomes a prompt and a problem.

    Args:
        path: a local ``.jsonl`` or ``.jsonl.gz`` of the EvalPlus release.
        allow_code_execution: must be true to grade: it runs model-written code in the sandbox.
        cache_dir: folder for expected outputs, private to its owner; memory only by default.
        base_only: grades by the original inputs alone.
    """

    runs_code = True
    required_fields = ("task_id", "prompt", "entry_point", "canonical_solution")
    _file: str
    """Name of the release's file, for messages."""

    def __init__(
        self,
        path: str | None = None,
        *,
        allow_code_execution: bool = False,
        cache_dir: str | None = None,
        base_only: bool = False,
        **options: Any,
    ) -> None:
        if path is None:
            raise ValueError(
                f"path: the task {self.name!r} needs a local file of the EvalPlus release, such as "
                f"{self._file} (its hub copy lacks the inputs)"
            )
        self.allow_code_execution = allow_code_execution
        self._base_only = base_only
        self._grader = PlusGrader(cache_dir=cache_dir, allow_code_execution=allow_code_execution)
        super().__init__(path, **options)

    @abstractmethod
    def _question(self, row: Row) -> str:
        """What the template gets as ``question``."""

    @abstractmethod
    def _solution(self, row: Row) -> str:
        """The reference solution as a whole module."""

    def _stub(self, row: Row) -> str:
        """What the prompt shows of the module; nothing by default."""
        return ""

    @abstractmethod
    def problem(self, example: PromptExample) -> PlusProblem:
        """The problem in the form the grader takes."""

    def _example(self, row: Row) -> PromptExample:
        reference = {
            "task_id": row.text("task_id"),
            "entry_point": row.text("entry_point"),
            "stub": self._stub(row),
            "code": self._solution(row),
            **plus_fields(row),
        }
        return self._prompt(row, problem_number(row), self._question(row), reference)

    def _problem(
        self,
        example: PromptExample,
        base_inputs: Sequence[Any],
        plus_inputs: Sequence[Any],
        *,
        rule: Rule,
        alternative: Callable[..., Any] | None = None,
    ) -> PlusProblem:
        reference = example.reference
        return PlusProblem(
            name=reference["task_id"],
            entry_point=reference["entry_point"],
            reference_code=reference["code"],
            base_inputs=base_inputs,
            plus_inputs=plus_inputs,
            atol=reference["atol"],
            rule=rule,
            alternative=alternative,
        )

    def reference_completion(self, example: PromptExample) -> str:
        """The release's solution in a fenced block."""
        return python_block(example.reference["code"])

    def extract(self, example: PromptExample, completion: str) -> str | None:
        """The module that is run: the prompt's stub, if any, and the code of the completion."""
        return self._found(example, completion).code

    def grade(self, example: PromptExample, completion: str) -> Verdict:
        """Compares the completion's outputs with the reference solution's on all inputs."""
        found = self._found(example, completion)
        if (verdict := ungradable(found)) is not None:
            return verdict
        assert found.code is not None
        return self._grader.grade(found.code, self.problem(example), base_only=self._base_only)

    @staticmethod
    def _found(example: PromptExample, completion: str) -> ExtractedCode:
        reference = example.reference
        answer = example.answer_start + completion
        return extract_code(answer, reference["entry_point"], stub=reference["stub"])


def problem_number(row: Row) -> str:
    """The number in a ``task_id`` such as ``HumanEval/7``, as five digits."""
    return row.text("task_id").rpartition("/")[2].zfill(5)


def plus_fields(row: Row) -> dict[str, Any]:
    """``base_input``, ``plus_input`` and ``atol`` of a row of the EvalPlus release.

    Raises:
        ValueError: one is malformed; names file, line and field.
    """
    fields: dict[str, Any] = {}
    for name in ("base_input", "plus_input"):
        value = row.fields.get(name)
        if value == {}:
            value = []  # how the release writes "none" for Mbpp/793
        if not isinstance(value, list) or not all(isinstance(args, list) for args in value):
            raise ValueError(f"{row.origin}: field {name!r} must be a list of argument lists")
        fields[name] = value
    atol = row.fields.get("atol")
    if isinstance(atol, bool) or not isinstance(atol, int | float) or atol < 0:
        raise ValueError(f"{row.origin}: field 'atol' must be a number of at least 0")
    fields["atol"] = float(atol)
    return fields
