"""What HumanEval+ and MBPP+ share: many inputs and a reference solution (arXiv 2305.01210)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from lit_dlm.grading import Verdict
from lit_dlm.grading.plus import PlusGrader, PlusProblem, Rule
from lit_dlm.tasks.base import CodeTask, PromptExample
from lit_dlm.tasks.sources import Row


class PlusTask(CodeTask):
    """Base of the EvalPlus tasks; a subclass says how a row becomes a prompt and a problem.

    Args:
        path: a local ``.jsonl`` or ``.jsonl.gz`` of the EvalPlus release.
    """

    required_fields = ("task_id", "prompt", "entry_point", "canonical_solution")
    wanted_source = "a local file of the EvalPlus release (MbppPlus or HumanEvalPlus .jsonl.gz)"

    def __init__(self, path: str | None = None, **options: Any) -> None:
        super().__init__(path, **options)
        self._grader = PlusGrader(allow_code_execution=self.allow_code_execution)

    @abstractmethod
    def _parts(self, row: Row) -> tuple[str, str, str]:
        """Returns the question, the part of a module that prompts show, and the whole solution."""

    @abstractmethod
    def _rule(self, entry_point: str) -> tuple[Rule, Callable[..., Any] | None]:
        """Returns how outputs are compared, and what else is right for the rule ``either``."""

    def _restored(self, task_id: str, inputs: list[Any]) -> list[Any]:
        return inputs

    def _example(self, row: Row) -> PromptExample:
        question, stub, solution = self._parts(row)
        atol = row.get("atol", (int, float), "a number")
        row.expect(atol >= 0, "at least 0 in field 'atol'", atol)
        reference = {
            "task_id": row.text("task_id"),
            "entry_point": row.text("entry_point"),
            "stub": stub,
            "solution": solution,
            "base_input": _inputs(row, "base_input"),
            "plus_input": _inputs(row, "plus_input"),
            "atol": float(atol),
        }
        return self._prompt(row, problem_number(row), question, reference)

    def problem(self, example: PromptExample) -> PlusProblem:
        reference = example.reference
        rule, alternative = self._rule(reference["entry_point"])
        # From the example, at each grading: restored values are no JSON, and references are.
        return PlusProblem(
            name=reference["task_id"],
            entry_point=reference["entry_point"],
            reference_code=reference["solution"],
            base_inputs=self._restored(reference["task_id"], reference["base_input"]),
            plus_inputs=self._restored(reference["task_id"], reference["plus_input"]),
            atol=reference["atol"],
            rule=rule,
            alternative=alternative,
        )

    def _graded(self, example: PromptExample, code: str) -> Verdict:
        return self._grader.grade(code, self.problem(example))


def problem_number(row: Row) -> str:
    """Returns the number in a ``task_id`` such as ``HumanEval/7``, as five digits."""
    return row.text("task_id").rpartition("/")[2].zfill(5)


def _inputs(row: Row, name: str) -> list[list[Any]]:
    given: Any = row.fields.get(name)
    value = [] if given == {} else given  # how the release writes "none" for Mbpp/793
    has_lists = isinstance(value, list) and all(isinstance(args, list) for args in value)
    row.expect(has_lists, f"a list of argument lists in field {name!r}", given)
    return list(value)
