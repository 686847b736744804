"""HumanEval (arXiv 2107.03374) and HumanEval+ (arXiv 2305.01210): complete a Python function.

HumanEval is graded by the data set's own ``check(candidate)``, HumanEval+ by its inputs and the
reference solution. The two scores are different things and have different task names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lit_dlm.grading import SandboxLimits, Verdict
from lit_dlm.grading.code import extract_code, grade_by_tests, ungradable
from lit_dlm.grading.plus import MatchRule, PlusGrader, PlusProblem
from lit_dlm.tasks.base import PromptExample, Task
from lit_dlm.tasks.sources import Row, pick_rows, read_rows

HUB_ID = "openai/openai_humaneval"
_INSTRUCTION = (
    "Complete this Python function. Answer with the whole function in one fenced python block."
)
_INSTRUCTION_WITH_TESTS = (
    "Write Python code that passes the tests below. Define {entry_point} exactly as given. Answer "
    "with code only, in one fenced python block, without an explanation."
)


class HumanEval(Task):
    """The 164 problems of HumanEval.

    Args:
        path: a local file or folder with the fields ``task_id``, ``prompt``, ``entry_point``,
            ``canonical_solution`` and ``test``, or a hub id.
        split: name of the split.
        limit: most examples to take; all by default.
        seed: shuffles before the limit; the file's order by default.
        tests_in_prompt: shows the grading tests to the model. Scores are then not HumanEval
            scores; it exists for parity with a published protocol that did this.
        allow_code_execution: must be true to grade: it runs model-written code in the sandbox.
        limits: what one sample may use.
    """

    name = "humaneval"
    runs_code = True
    _required: tuple[str, ...] = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
    _hub_id: str | None = HUB_ID

    def __init__(
        self,
        path: str | None = None,
        *,
        split: str = "test",
        limit: int | None = None,
        seed: int | None = None,
        tests_in_prompt: bool = False,
        allow_code_execution: bool = False,
        limits: SandboxLimits | None = None,
    ) -> None:
        self.split = split
        self.tests_in_prompt = tests_in_prompt
        self.allow_code_execution = allow_code_execution
        self._limits = limits
        source = path or self._hub_id
        if source is None:
            raise ValueError(
                f"path: the task {self.name!r} needs a local file of the EvalPlus release, such as "
                "HumanEvalPlus.jsonl.gz (its hub copy lacks the inputs)"
            )
        rows = read_rows(source, split=split, required=self._required)
        self._examples = [self._example(row) for row in pick_rows(rows, seed=seed, limit=limit)]

    def _example(self, row: Row) -> PromptExample:
        reference = {name: row.text(name) for name in self._required if name != "task_id"}
        stub, entry_point = reference["prompt"], reference["entry_point"]
        if self.tests_in_prompt:
            instruction = _INSTRUCTION_WITH_TESTS.format(entry_point=entry_point)
            text = f"{instruction}\n\nProblem:\n{_fence(stub)}\n\nUnit tests:\n"
            text += _fence(reference["test"])
        else:
            text = f"{_INSTRUCTION}\n\n{_fence(stub)}"
        return PromptExample(
            uid=self._uid(row),
            task=self.name,
            text=text,
            reference={**reference, "task_id": row.text("task_id")},
        )

    def _uid(self, row: Row) -> str:
        number = row.text("task_id").rpartition("/")[2]
        return f"{self.name}/{self.split}/{number.zfill(5)}"

    def examples(self) -> Sequence[PromptExample]:
        """The chosen problems in a stable order."""
        return self._examples

    def reference_completion(self, example: PromptExample) -> str:
        """The canonical solution as a whole function in a fenced block."""
        return _fence(example.reference["prompt"] + example.reference["canonical_solution"])

    def extract(self, example: PromptExample, completion: str) -> str | None:
        """The module that is run: the prompt's stub and the code of the completion."""
        reference = example.reference
        return extract_code(completion, reference["entry_point"], stub=reference["prompt"]).code

    def grade(self, example: PromptExample, completion: str) -> Verdict:
        """Runs the problem's tests against the completion, in the sandbox."""
        reference = example.reference
        return grade_by_tests(
            completion,
            reference["test"],
            reference["entry_point"],
            stub=reference["prompt"],
            limits=self._limits,
            allow_code_execution=self.allow_code_execution,
        )


class HumanEvalPlus(HumanEval):
    """HumanEval with about 80 times as many tests.

    Args:
        path: a local ``HumanEvalPlus.jsonl`` or ``.jsonl.gz`` of the EvalPlus release.
        split: a label, part of every uid.
        limit: most examples to take; all by default.
        seed: shuffles before the limit; the file's order by default.
        allow_code_execution: must be true to grade: it runs model-written code in the sandbox.
        cache_dir: folder for expected outputs, private to its owner; memory only by default.
        base_only: grades by the original inputs alone.
    """

    name = "humaneval+"
    _required = ("task_id", "prompt", "entry_point", "canonical_solution")
    _hub_id = None

    def __init__(
        self,
        path: str | None = None,
        *,
        split: str = "test",
        limit: int | None = None,
        seed: int | None = None,
        allow_code_execution: bool = False,
        cache_dir: str | None = None,
        base_only: bool = False,
    ) -> None:
        super().__init__(
            path, split=split, limit=limit, seed=seed, allow_code_execution=allow_code_execution
        )
        self._base_only = base_only
        self._grader = PlusGrader(cache_dir=cache_dir, allow_code_execution=allow_code_execution)

    def _example(self, row: Row) -> PromptExample:
        example = super()._example(row)
        example.reference.update(plus_fields(row))
        return example

    def grade(self, example: PromptExample, completion: str) -> Verdict:
        """Compares the completion's outputs with the reference solution's on all inputs."""
        reference = example.reference
        found = extract_code(completion, reference["entry_point"], stub=reference["prompt"])
        if (verdict := ungradable(found)) is not None:
            return verdict
        assert found.code is not None
        return self._grader.grade(found.code, self.problem(example), base_only=self._base_only)

    @staticmethod
    def problem(example: PromptExample) -> PlusProblem:
        """The inputs and the reference solution in the form the grader takes."""
        reference = example.reference
        match = _root_rule(reference["atol"]) if reference["entry_point"] == "find_zero" else None
        return PlusProblem(
            name=reference["task_id"],
            entry_point=reference["entry_point"],
            reference_code=reference["prompt"] + reference["canonical_solution"],
            base_inputs=reference["base_input"],
            plus_inputs=reference["plus_input"],
            atol=reference["atol"],
            match=match,
        )


def plus_fields(row: Row) -> dict[str, Any]:
    """The fields that EvalPlus adds to a problem, checked.

    Args:
        row: A row of the EvalPlus release.

    Returns:
        ``base_input``, ``plus_input`` and ``atol``.

    Raises:
        ValueError: Naming file, line and field.
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


def _root_rule(tolerance: float) -> MatchRule:
    """HumanEval/32 asks for any root of a polynomial: its value there must be about 0."""

    def is_root(inputs: Sequence[Any], output: Any, _expected: Any) -> bool:
        value = sum(factor * output**power for power, factor in enumerate(inputs[0]))
        return abs(value) <= tolerance

    return is_root


def _fence(code: str) -> str:
    return f"```python\n{code.strip()}\n```"
