"""MBPP (arXiv 2108.07732) and MBPP+ (arXiv 2305.01210): a Python function from one sentence.

MBPP is graded by its assertions, MBPP+ by inputs and a reference solution. The ``evalplus`` package
(extra ``code``) restores the types of MBPP+'s inputs and lists the problems with more than one
right output; none of its functions called here runs code or reads a file.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from lit_dlm.grading import SandboxLimits
from lit_dlm.grading.plus import Rule
from lit_dlm.system.extras import pip_install, required
from lit_dlm.system.options import one_of
from lit_dlm.tasks.base import CodeTask, PromptExample
from lit_dlm.tasks.plus import PlusTask
from lit_dlm.tasks.sources import Row

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


class MBPP(CodeTask):
    """The 974 problems of MBPP; of a file, those of the official split (11 to 510 are the test)."""

    name = "mbpp"
    # Problem 123 takes 8 s with its canonical solution.
    limits = SandboxLimits(wall_seconds=20.0, cpu_seconds=20.0)
    hub_id = "google-research-datasets/mbpp"
    hub_config = "full"
    required_fields = ("task_id", "text", "code", "test_list")
    own_template = _TEMPLATE

    def _usable(self, rows: list[Row], split: str) -> list[Row]:
        one_of(*_SPLITS, split=split)
        numbers = _SPLITS[split]
        # A file of the release has all problems; one that holds a split already loses nothing.
        usable = [row for row in rows if _number(row) in numbers]
        wanted = f"a problem of the split {split!r} ({numbers})"
        rows[0].expect(bool(usable), wanted, [_number(row) for row in rows])
        return usable

    def _example(self, row: Row) -> PromptExample:
        tests, code = row.texts("test_list"), row.text("code")
        reference = {
            "task_id": _number(row),
            "entry_point": _entry_point(code, tests, row),
            "check": "\n".join([row.fields.get("test_setup_code") or "", *tests]),
            "stub": "",
            "solution": code,
        }
        return self._prompt(row, f"{_number(row):05d}", row.text("text").strip(), reference)


class MBPPPlus(PlusTask):
    """378 of the problems (MBPP+ v0.2.0) with 35 times as many tests; see :class:`PlusTask`."""

    name = "mbpp+"
    own_template = "{{ question }}\n\n" + _INSTRUCTION

    def _parts(self, row: Row) -> tuple[str, str, str]:
        # The release's prompt is a docstring with its quotes.
        question = row.text("prompt").strip().strip(chr(34)).strip()
        return question, "", row.text("canonical_solution")

    def _restored(self, task_id: str, inputs: list[Any]) -> list[Any]:
        # JSON has no tuples, sets or complex numbers; the release says by task what becomes which.
        return list(_evalplus("data.mbpp").mbpp_deserialize_inputs(task_id, inputs))

    def _rule(self, entry_point: str) -> tuple[Rule, Callable[..., Any] | None]:
        """Returns EvalPlus's rule; all but ``close`` allow more than one right output."""
        special = _evalplus("eval._special_oracle")
        if entry_point in special.MBPP_OUTPUT_SET_EQ_TASKS:
            return "same_set", None
        if entry_point in special.MBPP_OUTPUT_NOT_NONE_TASKS:
            return "found_alike", None
        if entry_point == "are_equivalent":  # Mbpp/164, where EvalPlus takes any output
            return "anything", None
        alternatives = {
            "sum_div": lambda *_inputs: 0,
            "surface_Area": special._surface_Area,
            "digit_distance_nums": special._digit_distance_nums,
        }
        alternative = alternatives.get(entry_point)
        return ("close", None) if alternative is None else ("either", alternative)


def _number(row: Row) -> int:
    return int(row.get("task_id", int, "an integer"))


def _entry_point(code: str, tests: Sequence[str], row: Row) -> str:
    """Returns the function under test: the last one that the solution defines and tests use."""
    defined, *trees = (row.parsed(text).body for text in (code, *tests))
    nodes = (node for tree in trees for part in tree for node in ast.walk(part))
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    # Solutions define helpers first, and tests may call one of these, too.
    names = [n.name for n in defined if isinstance(n, ast.FunctionDef) and n.name in used]
    row.expect(bool(names), "tests that call a function of field 'code'", tests)
    return names[-1]


def _evalplus(module: str) -> Any:
    try:
        return import_module(f"evalplus.{module}")
    except ImportError as error:
        raise ValueError(
            f"the task 'mbpp+' needs the package evalplus: {pip_install(required('code'))} "
            f"({error.name or error} is missing)"
        ) from None
