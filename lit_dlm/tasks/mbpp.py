"""MBPP (arXiv 2108.07732) and MBPP+ (arXiv 2305.01210): a Python function from one sentence.

MBPP is graded by its assertions, MBPP+ by inputs and the reference solution. MBPP+ stores its
inputs as JSON, from which the ``evalplus`` package (extra ``code``) restores tuples, sets and
complex numbers; its lists of problems with more than one right output are used as well. Nothing
of it executes code here, and none of the functions called reads a file or the network.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

from lit_dlm.grading import SandboxLimits, Verdict
from lit_dlm.grading.code import CANDIDATE_FILE, extract_code, grade_by_tests, python_block
from lit_dlm.grading.plus import PlusProblem, Rule
from lit_dlm.tasks.base import PromptExample, Task
from lit_dlm.tasks.plus import PlusTask
from lit_dlm.tasks.sources import Row, pick_rows, read_rows
from lit_dlm.tasks.templates import PromptTemplate

HUB_ID = "google-research-datasets/mbpp"
_SPLITS = {
    "prompt": range(1, 11),
    "test": range(11, 511),
    "validation": range(511, 601),
    "train": range(601, 975),
}
_INSTRUCTION = "Answer with the code in one fenced python block."
_TEMPLATE = (
    "{{ question }}\n\nThe code must pass these tests:\n"
    "```python\n{{ test_list | join('\n') | trim }}\n```\n\n" + _INSTRUCTION
)
_TEMPLATE_WITHOUT_TESTS = (
    "{{ question }}\n\nThe function must be called as {{ signature }}.\n\n" + _INSTRUCTION
)
# Problem 123 takes 8 s with its canonical solution.
_LIMITS = SandboxLimits(wall_seconds=20.0, cpu_seconds=20.0)


class MBPP(Task):
    """The 974 problems of MBPP in their official splits (11 to 510 are the test split).

    Args:
        path: a local file or folder with the fields ``task_id``, ``text``, ``code`` and
            ``test_list``, or a hub id. Rows of other splits in the file are left out.
        split: ``test``, ``train``, ``validation`` or ``prompt``.
        limit: most examples to take; all by default.
        seed: shuffles before the limit; the file's order by default.
        tests_in_prompt: shows the assertions, as the benchmark is meant: they alone say how the
            function is called. Without them the prompt gives the function's name and arguments
            (``signature``). It chooses between two templates of the task's own.
        allow_code_execution: must be true to grade: it runs model-written code in the sandbox.
        limits: what one sample may use.
        template: how a row becomes a prompt: a shipped name, a file or a Jinja text
            (:mod:`lit_dlm.tasks.templates`); the task's own by default.
    """

    name = "mbpp"
    runs_code = True

    def __init__(
        self,
        path: str | None = None,
        *,
        split: str = "test",
        limit: int | None = None,
        seed: int | None = None,
        tests_in_prompt: bool = True,
        allow_code_execution: bool = False,
        limits: SandboxLimits | None = None,
        template: str | None = None,
    ) -> None:
        if split not in _SPLITS:
            raise ValueError(f"split: expected {', '.join(_SPLITS)}, got {split!r}")
        self.split = split
        own = _TEMPLATE if tests_in_prompt else _TEMPLATE_WITHOUT_TESTS
        self._template = PromptTemplate(template, default=own)
        self.template = self._template.given
        self.allow_code_execution = allow_code_execution
        self._limits = limits or _LIMITS
        source = path or HUB_ID
        required = ("task_id", "text", "code", "test_list")
        rows = read_rows(source, config="full", split=split, required=required)
        of_split = [row for row in rows if _number(row) in _SPLITS[split]]
        if not of_split:
            raise ValueError(f"{source}: no problem of the split {split!r} ({_SPLITS[split]})")
        self._examples = [self._example(row) for row in pick_rows(of_split, seed=seed, limit=limit)]

    def _example(self, row: Row) -> PromptExample:
        tests = row.fields["test_list"]
        if not isinstance(tests, list) or not tests or not all(isinstance(t, str) for t in tests):
            raise ValueError(f"{row.origin}: field 'test_list' must be a list of assertions")
        code = row.text("code")
        entry_point, signature = _entry_point(code, tests, row.origin)
        return PromptExample(
            uid=f"{self.name}/{self.split}/{_number(row):05d}",
            task=self.name,
            reference={
                "task_id": _number(row),
                "entry_point": entry_point,
                "check": "\n".join([row.fields.get("test_setup_code") or "", *tests]),
                "code": code,
            },
            **self._template.render(
                {**row.fields, "question": row.text("text").strip(), "signature": signature}
            ),
        )

    def examples(self) -> Sequence[PromptExample]:
        """The chosen problems in a stable order."""
        return self._examples

    def reference_completion(self, example: PromptExample) -> str:
        """The data set's solution in a fenced block."""
        return python_block(example.reference["code"])

    def extract(self, example: PromptExample, completion: str) -> str | None:
        """The code of the completion."""
        answer = example.answer_start + completion
        return extract_code(answer, example.reference["entry_point"]).code

    def grade(self, example: PromptExample, completion: str) -> Verdict:
        """Runs the assertions against the completion, in the sandbox."""
        return grade_by_tests(
            example.answer_start + completion,
            example.reference["check"],
            example.reference["entry_point"],
            limits=self._limits,
            allow_code_execution=self.allow_code_execution,
        )


class MBPPPlus(PlusTask):
    """The 378 problems of MBPP+ (v0.2.0), with about 35 times as many tests.

    Args:
        path: a local ``MbppPlus.jsonl`` or ``.jsonl.gz`` of the EvalPlus release.
        split: a label, part of every uid.
        limit: most examples to take; all by default.
        seed: shuffles before the limit; the file's order by default.
        allow_code_execution: must be true to grade: it runs model-written code in the sandbox.
        cache_dir: folder for expected outputs, private to its owner; memory only by default.
        base_only: grades by the original inputs alone.
        template: how a row becomes a prompt: a shipped name, a file or a Jinja text
            (:mod:`lit_dlm.tasks.templates`); the task's own by default.
    """

    name = "mbpp+"
    _file = "MbppPlus.jsonl.gz"
    _default = "{{ question }}\n\n" + _INSTRUCTION

    def _question(self, row: Row) -> str:
        return row.text("prompt").strip().strip(chr(34)).strip()

    def _solution(self, row: Row) -> str:
        return row.text("canonical_solution")

    def problem(self, example: PromptExample) -> PlusProblem:
        """The inputs, re-typed, and the reference solution in the form the grader takes."""
        reference = example.reference
        restore = _evalplus_restore()
        rule, alternative = _special_rule(reference["entry_point"])
        return self._problem(
            example,
            restore(reference["task_id"], reference["base_input"]),
            restore(reference["task_id"], reference["plus_input"]),
            rule=rule,
            alternative=alternative,
        )


def _number(row: Row) -> int:
    value = row.fields["task_id"]
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{row.origin}: field 'task_id' must be an integer, got {value!r}")
    return value


def _entry_point(code: str, tests: Sequence[str], origin: str) -> tuple[str, str]:
    """The function under test, and how it is called: defined by the solution, used by the tests."""
    try:
        defined = ast.parse(code, CANDIDATE_FILE).body
        used = {
            node.id
            for test in tests
            for node in ast.walk(ast.parse(test, CANDIDATE_FILE))
            if isinstance(node, ast.Name)
        }
    except SyntaxError as error:
        raise ValueError(f"{origin}: the code or a test does not parse ({error.msg})") from None
    functions = [n for n in defined if isinstance(n, ast.FunctionDef) and n.name in used]
    if functions:
        chosen = functions[-1]
        return chosen.name, f"{chosen.name}({ast.unparse(chosen.args)})"
    raise ValueError(f"{origin}: the tests call no function that the field 'code' defines")


def _evalplus_restore() -> Any:
    try:
        from evalplus.data.mbpp import mbpp_deserialize_inputs
    except ImportError as error:
        raise _evalplus_missing(error) from None
    return mbpp_deserialize_inputs


def _evalplus_missing(error: ImportError) -> ValueError:
    return ValueError(
        "the task 'mbpp+' needs the package evalplus 0.3.1: pip install 'lit-dlm[code]' "
        f"({error.name or error} is missing)"
    )


def _special_rule(entry_point: str) -> tuple[Rule, Callable[..., Any] | None]:
    """EvalPlus's rules for problems that have more than one right output."""
    try:
        from evalplus.eval import _special_oracle as special
    except ImportError as error:
        raise _evalplus_missing(error) from None
    if entry_point in special.MBPP_OUTPUT_SET_EQ_TASKS:
        return "same_set", None
    if entry_point in special.MBPP_OUTPUT_NOT_NONE_TASKS:
        return "found_alike", None
    if entry_point == "are_equivalent":
        return "anything", None
    alternatives = {
        "sum_div": lambda *_inputs: 0,
        "surface_Area": special._surface_Area,
        "digit_distance_nums": special._digit_distance_nums,
    }
    alternative = alternatives.get(entry_point)
    return ("close", None) if alternative is None else ("either", alternative)
