"""KodCode (arXiv 2503.02951): synthetic coding problems with pytest-style tests.

The tests import the answer from a module named ``solution`` and run in the sandbox's trusted
process, where neither that module nor pytest exists, so :func:`checks` rewrites them.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

from lit_dlm.grading import Verdict
from lit_dlm.tasks.base import CodeTask, PromptExample
from lit_dlm.tasks.sources import Row

_MODULE = "solution"
PYTEST = """
class pytest:
    class raises:
        def __init__(self, expected, match=None):
            self.expected, self.match, self.value = expected, match, None

        def __enter__(self):
            return self

        def __exit__(self, kind, error, traceback):
            if kind is None:
                raise AssertionError("no exception was raised")
            if not issubclass(kind, self.expected):
                return False
            import re
            if self.match is not None and not re.search(self.match, str(error)):
                raise AssertionError("the exception has another message")
            self.value = error
            return True

    class approx:
        def __init__(self, expected, rel=None, abs=None):
            if rel is None:
                rel = 1e-6 if abs is None else 0.0
            self.expected, self.rel, self.abs = expected, rel, 1e-12 if abs is None else abs

        def __eq__(self, got):
            return self._close(got, self.expected)

        def _close(self, got, expected):
            if isinstance(expected, dict):
                return got.keys() == expected.keys() and all(
                    self._close(got[key], expected[key]) for key in expected
                )
            if isinstance(expected, (list, tuple)):
                return len(got) == len(expected) and all(map(self._close, got, expected))
            return got == expected or abs(expected) != float("inf") and (
                max(got - expected, expected - got)
                <= max(self.rel * max(expected, -expected), self.abs)
            )
"""
"""What replaces pytest in the tests: those two of its names that KodCode calls."""


class KodCode(CodeTask):
    """Problems of KodCode, or of a file of the same form.

    A row has the problem in ``question`` (or ``prompt``: the beginning of a module), the tests in
    ``test_code`` or ``test``, and the name of the function in ``entry_point`` or ``test_info``. A
    field ``solution`` may hold code that passes. Problems whose tests need other packages than the
    standard library, or pytest's fixtures, are ungraded, and left out of RL. The answer runs in its
    own process, so tests of what it prints, of files, or of a list from which it takes and returns
    elements fail: of KodCode's 232 demo rows, 220 solutions are right, 6 ungraded and 6 wrong.
    Templates are also given ``test`` and ``entry_point``. TraceLock's filtered set is
    ``BOB12311/kodcode-humaneval-like``.
    """

    name = "kodcode"
    hub_id = "KodCode/KodCode-V1"
    split = "train"
    own_template = "{{ question }}\n\nAnswer with the code in one fenced python block."

    def _example(self, row: Row) -> PromptExample:
        fields = row.fields
        question = row.text("question" if "question" in fields else "prompt")
        test = row.text("test_code" if "test_code" in fields else "test")
        solution = fields.get("solution") or fields.get("canonical_solution") or ""
        entry_point = _entry_point(row, test, solution)
        check, reason = checks(test, entry_point)
        reference = {
            "entry_point": entry_point,
            "check": check,
            "ungraded": reason,
            "stub": "" if "question" in fields else question,
            "solution": solution,
        }
        key = f"{row.index:06d}"
        return self._prompt(row, key, question, reference, test=test, entry_point=entry_point)

    def grade(self, example: PromptExample, completion: str) -> Verdict:
        # Not wrong, which would blame the answer, and not refused: the prompt is as good as others.
        if reason := example.reference["ungraded"]:
            return Verdict(status="ungraded", detail=reason)
        return super().grade(example, completion)


def _entry_point(row: Row, test: str, solution: str) -> str:
    """Returns what the row names, else the last that the solution defines and tests mention."""
    test_info = [one for one in row.fields.get("test_info") or () if isinstance(one, dict)]
    named = [row.fields.get("entry_point"), *(e.get("function_name") for e in test_info)]
    if name := next(filter(None, named), None):
        return str(name)
    try:
        defined = [getattr(node, "name", None) for node in ast.parse(solution).body]
    except (SyntaxError, ValueError):
        return ""
    # The last, since helpers come first; tests that mention none cannot be rewritten.
    mentioned = set(re.findall(r"\w+", test))
    return next((str(name) for name in reversed(defined) if name in mentioned), "")


def checks(test_code: str, entry_point: str) -> tuple[str, str]:
    """Returns tests for :func:`~lit_dlm.grading.run_python_check`, and why there are none.

    Imports of the answer and of pytest are removed, since the grader binds the answer's names and
    :data:`PYTEST` replaces pytest; every function named ``test_...`` becomes one assertion. Tests
    that define ``check(candidate)`` alone are not changed.
    """
    try:
        tree = ast.parse(test_code)
    except (SyntaxError, ValueError) as error:
        return "", f"the tests do not parse ({error})"
    functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    tests = {name: node for name, node in functions.items() if name.startswith("test")}
    if entry_point and "check" in functions and not tests:  # HumanEval's form: the grader knows it
        return test_code, ""
    if reason := _why_ungraded(tree, tests, entry_point):
        return "", reason
    if helper := functions.get("check"):  # within a block, or the grader would call it
        tree.body[tree.body.index(helper)] = ast.If(ast.Constant(True), [helper], [])
    rewritten = ast.unparse(ast.fix_missing_locations(_WithoutImports().visit(tree)))
    # Each assertion is true once the function has returned, whatever it returned.
    return "\n".join([PYTEST, rewritten, *(f"assert [{name}()]" for name in tests)]), ""


def _why_ungraded(tree: ast.Module, tests: dict[str, ast.FunctionDef], entry_point: str) -> str:
    defined = {getattr(node, "name", None) for node in tree.body}
    # Fixtures and parametrised tests get their arguments from pytest's own machinery.
    awkward = [n for n, node in tests.items() if ast.unparse(node.args) or node.decorator_list]
    foreign = [name for name in _modules(tree) if name not in sys.stdlib_module_names]
    reasons: dict[str, object] = {
        "nothing tells the name of the function under test": not entry_point,
        f"the tests define {entry_point!r} themselves": entry_point in defined,
        "there is no function named test_...": not tests,
        f"{' and '.join(awkward)} needs pytest to give it arguments": awkward,
        f"the tests import {', '.join(map(repr, foreign))}": foreign,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _modules(tree: ast.Module) -> Iterator[str]:
    """Yields the names of imported packages, except the answer's module and ``import pytest``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module != _MODULE:
            yield (node.module or ".").split(".")[0]
        for alias in node.names if isinstance(node, ast.Import) else ():
            if alias.name != _MODULE and (alias.name != "pytest" or alias.asname):
                yield alias.name.split(".")[0]


class _WithoutImports(ast.NodeTransformer):
    def __init__(self) -> None:
        self.module_names: set[str] = set()

    def visit_Import(self, node: ast.Import) -> ast.stmt:
        self.module_names |= {a.asname or a.name for a in node.names if a.name == _MODULE}
        kept = [alias for alias in node.names if alias.name not in (_MODULE, "pytest")]
        return ast.Import(kept) if kept else ast.Pass()

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        if node.module != _MODULE:
            return node
        # The grader binds the answer's names; only those that the tests call otherwise are left.
        renamed = [a for a in node.names if a.asname]
        if not renamed:
            return ast.Pass()
        names = ast.Tuple([ast.Name(a.asname or "", ast.Store()) for a in renamed], ast.Store())
        values = ast.Tuple([ast.Name(a.name, ast.Load()) for a in renamed], ast.Load())
        return ast.Assign([names], values)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id in self.module_names:
            return ast.Name(node.attr, node.ctx)
        return node
