"""Code in completions: finding it, and comparing what it returned with what was expected."""

from __future__ import annotations

import ast
import itertools
import math
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lit_dlm.grading.launch import SandboxLimits
from lit_dlm.grading.sandbox import CANDIDATE_FILE, run_python_check
from lit_dlm.grading.verdict import Verdict

_FENCE = re.compile(r"^[ \t]*(?P<fence>`{3,}|~{3,})[ \t]*(?P<tag>[\w+.-]*)[^\n]*$", re.MULTILINE)
_PYTHON_TAGS = {"", "python", "py", "python3", "python2", "py3"}
_NOT_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError)
_MAX_CUTS = 40
"""How many places to cut trailing text off are tried; each costs one parse."""


@dataclass(frozen=True, kw_only=True)
class ExtractedCode:
    """Code found in a completion."""

    code: str | None
    """A module that defines the entry point, or the best there is; ``None`` if there is nothing."""
    problem: str = ""
    """Why it cannot be graded: a syntax error or a missing entry point; empty if it can."""
    is_syntax_error: bool = False
    """Whether the problem is that nothing parses."""


def python_block(code: str) -> str:
    """Writes code as one fenced Python block."""
    return f"```python\n{code.strip()}\n```"


def fenced_blocks(text: str) -> list[str]:
    """The contents of all fenced Python blocks, in order; an unclosed last one runs to the end.

    Blocks tagged with another language are left out. A closing fence repeats the opening marker
    and has no tag.
    """
    blocks = []
    opening: re.Match[str] | None = None
    for match in _FENCE.finditer(text):
        if opening is None:
            opening = match
        elif match["fence"][0] == opening["fence"][0] and not match["tag"]:
            if opening["tag"].lower() in _PYTHON_TAGS:
                blocks.append(text[opening.end() + 1 : match.start()])
            opening = None
    if opening is not None and opening["tag"].lower() in _PYTHON_TAGS:
        blocks.append(text[opening.end() + 1 :])
    return blocks


def extract_code(completion: str, entry_point: str, *, stub: str = "") -> ExtractedCode:
    """Finds the code of an answer: the last fenced block that defines the entry point.

    Without such a block every block, last first, and then the whole text is tried, both as a
    module and as the continuation of ``stub``; text after the code is cut off.

    Args:
        completion: What the model wrote.
        entry_point: The function (or class) that must be defined.
        stub: Beginning of the module that the prompt showed: imports, helpers, signature and
            docstring; it may end within a definition. Its imports and helpers are put in front in
            any case.

    Returns:
        The code or the reason why there is none.
    """
    pieces = [block for block in reversed(fenced_blocks(completion)) if block.strip()]
    if not pieces and completion.strip():
        pieces = [completion]
    if not pieces:
        return ExtractedCode(code=None, problem="the completion holds no code")
    whole = _whole_part(stub).rstrip()
    head = f"{whole}\n\n\n" if whole else ""
    for piece in pieces:
        for candidate in _as_module(piece, entry_point):
            if _parses(code := head + candidate):
                return ExtractedCode(code=code)
    if stub.strip():
        for piece in pieces:
            for code in _as_continuation(stub, piece):
                if _defines(code, entry_point):
                    return ExtractedCode(code=code)
    if any(_parses(textwrap.dedent(piece)) for piece in pieces):
        problem = f"no function {entry_point!r} is defined"
        return ExtractedCode(code=head + textwrap.dedent(pieces[0]), problem=problem)
    return ExtractedCode(
        code=head + pieces[0], problem="the code does not parse", is_syntax_error=True
    )


def _as_module(piece: str, entry_point: str) -> Iterator[str]:
    """Versions of a piece that parse and define the entry point themselves."""
    for text in _without_tail(textwrap.dedent(piece).strip("\n")):
        if entry_point not in text:
            return
        if _parses(text) and _defines(text, entry_point):
            yield text
            return


def _as_continuation(stub: str, piece: str) -> Iterator[str]:
    """Versions of the stub completed by a piece, the piece's first line indented if need be."""
    body = piece.strip("\n").rstrip()
    if not body:
        return
    start = stub if stub.endswith("\n") else stub + "\n"
    first, _, rest = body.partition("\n")
    bare = textwrap.dedent(body)
    versions = [body] if body[0].isspace() else []
    for margin in dict.fromkeys(("    ", _margin(stub))):
        # A stripped first indentation, else a body written without any.
        versions += [f"{margin}{first}\n{rest}"] if bare == body else []
        versions += [textwrap.indent(bare, margin)]
    for text in itertools.chain(versions, *map(_without_tail, versions)):
        if text.strip() and _parses(start + text):
            yield start + text
            return


def _margin(stub: str) -> str:
    """The indentation of what follows a stub's last line."""
    last = stub.rstrip().rpartition("\n")[2]
    margin = last[: len(last) - len(last.lstrip())]
    return f"{margin}    " if last.endswith(":") else margin


def _whole_part(stub: str) -> str:
    """The stub, without an unfinished definition at its end."""
    return next(filter(_parses, _without_tail(stub)), "")


def _without_tail(text: str) -> Iterator[str]:
    """The text, then ever shorter beginnings that end before an unindented line."""
    yield text
    lines = text.splitlines(keepends=True)
    cuts = [i for i, line in enumerate(lines) if i and line[0] not in " \t\n\r#)]}"]
    for cut in list(reversed(cuts))[:_MAX_CUTS]:
        yield "".join(lines[:cut])


def _parse(code: str) -> ast.Module | None:
    try:
        return ast.parse(code, CANDIDATE_FILE)
    except _NOT_PYTHON:
        return None


def _parses(code: str) -> bool:
    # Compiled, because a bare parse lets a return outside a function through.
    try:
        compile(code, CANDIDATE_FILE, "exec", dont_inherit=True)
    except _NOT_PYTHON:
        return False
    return True


def _defines(code: str, name: str) -> bool:
    tree = _parse(code)
    if tree is None:
        return False
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name == name:
                return True
        elif isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == name for target in node.targets
        ):
            return True
    return False


def grade_by_tests(
    completion: str,
    check: str,
    entry_point: str,
    *,
    stub: str = "",
    limits: SandboxLimits | None = None,
    allow_code_execution: bool,
) -> Verdict:
    """Extracts the code of a completion and runs trusted tests against it.

    Args:
        completion: What the model wrote.
        check: The tests; see :func:`lit_dlm.grading.run_python_check`.
        entry_point: The function under test.
        stub: What the prompt showed of the module (trusted; its helpers serve the tests too).
        limits: What the sample may use.
        allow_code_execution: Must be ``True``.

    Returns:
        The verdict; ``no_answer`` if there is no code or it does not define the entry point.
    """
    found = extract_code(completion, entry_point, stub=stub)
    if (verdict := ungradable(found)) is not None:
        return verdict
    assert found.code is not None
    return run_python_check(
        found.code,
        check,
        entry_point,
        limits=limits,
        allow_code_execution=allow_code_execution,
        preamble=_whole_part(stub),
    )


def ungradable(found: ExtractedCode) -> Verdict | None:
    """The verdict on code that cannot be run, or ``None`` if it can."""
    if not found.problem:
        return None
    status = "syntax_error" if found.is_syntax_error else "no_answer"
    return Verdict(status=status, answer=found.code, detail=found.problem)  # type: ignore[arg-type]


def outputs_match(output: Any, expected: Any, *, atol: float = 0.0) -> bool:
    """Compares a returned value with the expected one by EvalPlus's rules.

    Equal values match. Otherwise, if ``atol`` is positive, or the expected value is a float or a
    non-empty list or tuple of floats (then ``atol`` is 1e-6), the types and lengths must be the
    same and the numbers within ``atol + 1e-7 * |expected|``. EvalPlus keeps that 1e-6 for all later
    inputs of a task once a float was seen; here each input is judged by itself.

    Args:
        output: What the candidate returned, made of builtin types.
        expected: What the reference solution returned.
        atol: Absolute tolerance of the problem.

    Returns:
        Whether they match.
    """
    if output == expected:
        return True
    if atol == 0 and _is_floats(expected):
        atol = 1e-6
    if atol == 0 or type(output) is not type(expected):
        return False
    return _all_close(output, expected, atol)


def _is_floats(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(item, float) for item in value)
    return isinstance(value, float)


def _all_close(output: Any, expected: Any, atol: float) -> bool:
    if isinstance(expected, list | tuple):
        return (
            isinstance(output, list | tuple)
            and len(output) == len(expected)
            and all(_all_close(o, e, atol) for o, e in zip(output, expected, strict=True))
        )
    numbers = int | float | complex
    if not isinstance(output, numbers) or not isinstance(expected, numbers):
        return False
    try:
        if output == expected:
            return True
        difference = abs(output - expected)
        return math.isfinite(difference) and difference <= atol + 1e-7 * abs(expected)
    except OverflowError:
        return False
