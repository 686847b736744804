"""Code problems with tests, in the JSON format of dLLM-RL (arXiv 2509.06949, its data folder)."""

from __future__ import annotations

import ast
import builtins
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lit_dlm.grading import SandboxLimits, Verdict
from lit_dlm.grading.code import grade_by_outputs
from lit_dlm.tasks.base import CodeTask, PromptExample
from lit_dlm.tasks.sources import Row

_TEMPLATE = (
    "{{ question }}\n\n{% if test_method == 'function' %}"
    "Answer with the code in one fenced python block.{% else %}"
    "Write a Python program that reads from standard input and prints its result. Answer with the "
    "whole program in one fenced python block.{% endif %}"
)
# Added to the time limit of a list of assertions, as in dLLM-RL.
_EXTRA_SECONDS = 2.0
_DEFAULT_SECONDS = 8.0
_BUILTINS = set(dir(builtins))


class CodeTests(CodeTask):
    """Code problems, each with its own tests and time limit.

    A row has ``question``, ``test_method`` and ``test_time_limit`` (seconds; 8 without one), and
    for ``function`` a ``test_list`` of assertions, for ``stdio`` the lists ``test_input`` and
    ``test_output``. A field ``prefix`` may hold code that is put in front of the answer,
    ``solution`` code that passes.
    """

    name = "code_tests"
    required_fields: tuple[str, ...] = ("question", "test_method")
    own_template = _TEMPLATE
    own_prefix = ""  # code put in front of answers to rows without a prefix
    by_line = False  # whether line breaks matter in what a program prints

    def _example(self, row: Row) -> PromptExample:
        method = row.text("test_method")
        row.expect(method in ("function", "stdio"), "test_method function or stdio", method)
        reference: dict[str, Any] = {
            "test_method": method,
            "seconds": _seconds(row),
            "entry_point": None,
            "stub": row.fields.get("prefix") or row.fields.get("Prefix") or self.own_prefix,
            "solution": row.fields.get("solution") or "",
        }
        if method == "function":
            tests = reference["test_list"] = row.texts("test_list")
            reference["check"] = "\n".join(tests)
            reference["entry_point"] = _entry_point(tests, row)
        else:
            reference["test_input"] = row.texts("test_input")
            reference["test_output"] = row.texts("test_output")
            counts = [len(reference[name]) for name in ("test_input", "test_output")]
            row.expect(counts[0] == counts[1], "as many test_output as test_input", counts)
        # Templates see the reference as well: those of dLLM-RL show the prefix and tell the method.
        question = row.text("question").strip()
        return self._prompt(row, f"{row.index:05d}", question, reference, **reference)

    def _graded(self, example: PromptExample, code: str) -> Verdict:
        reference = example.reference
        if reference["test_method"] == "function":
            return super()._graded(example, code)
        return grade_by_outputs(
            code,
            reference["test_input"],
            reference["test_output"],
            by_line=self.by_line,
            limits=self._limits_of(example),
            allow_code_execution=self.allow_code_execution,
        )

    def _limits_of(self, example: PromptExample) -> SandboxLimits:
        seconds = example.reference["seconds"]
        if example.reference["test_method"] == "function":
            seconds += _EXTRA_SECONDS
        return replace(self.limits, wall_seconds=seconds, cpu_seconds=seconds)


def _seconds(row: Row) -> float:
    value = row.fields.get("test_time_limit", _DEFAULT_SECONDS)
    # An hour at most: a row must not keep a worker busy for as long as it likes.
    is_time = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 3600
    row.expect(is_time, "a number of seconds in field 'test_time_limit'", value)
    return float(value)


def _entry_point(tests: Sequence[str], row: Row) -> str:
    """Returns the function under test: the name that most assertions call, the first if tied."""
    # The rows do not say it. A helper of the tests, or a class that they build, is called too, but
    # rarely by as many of them.
    calls: Counter[str] = Counter()
    for test in tests:
        nodes = list(ast.walk(row.parsed(test)))
        bound = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        bound |= {n.asname or n.name for n in nodes if isinstance(n, ast.alias)}
        called = (
            node.func.id
            for node in nodes
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        )
        # Each name once per test, in the order of the tree: outer calls come first.
        calls.update(dict.fromkeys((n for n in called if n not in bound | _BUILTINS), 1))
    row.expect(bool(calls), "tests that call a function of the answer", tests)
    return calls.most_common(1)[0][0]
