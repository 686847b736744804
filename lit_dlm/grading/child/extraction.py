"""Finds Python in a completion.

Runs in processes that may be killed (:mod:`.bounded`): compiling a text can take any amount of time
and memory, and can crash the interpreter.
"""

from __future__ import annotations

import ast
import itertools
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

CANDIDATE_FILE = "<candidate>"  # file name under which model-written code is compiled

_FENCE = re.compile(r"^[ \t]*(?P<fence>`{3,}|~{3,})[ \t]*(?P<tag>[\w+.-]*)[^\n]*$", re.MULTILINE)
_TAGGED = re.compile(r"```(?:python|py)[23]?[^\S\n]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_MARK = re.compile(r"^[ \t]*\[(?:(PYTHON|BEGIN)|/PYTHON|DONE)\][ \t]*$", re.MULTILINE)
_START = re.compile(
    r"^(?:@|(?:async )?def |class |import |from |[a-z]+ .*:$|[\w, ]+ = |\w+\()", re.M
)
_DEFINED = re.compile(r"^(?:def|class) (\w+)", re.M)
_FUTURE = re.compile(r"^from __future__ import [^\n]*\n?", re.MULTILINE)
_PYTHON_TAGS = {"", "python", "py", "python3", "python2", "py3"}
_NOT_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError)
# Number of places tried for cutting off text behind code and in front of it, and for the end of a
# block; each costs one parse.
_MAX_CUTS, _MAX_STARTS, _MAX_ENDS = 40, 8, 8


@dataclass(frozen=True, kw_only=True)
class ExtractedCode:
    """Code found in a completion."""

    code: str | None  # the code to run or, where that is impossible, the best that was found
    reason: str = ""  # why it cannot be graded: no code, a syntax error or a missing entry point
    is_syntax_error: bool = False


def fenced_blocks(text: str) -> list[str]:
    """The contents of all fenced Python blocks, in order; an unclosed last one runs to the end.

    A block ends at the first fence where it parses (a docstring may hold some), else at the first.
    """
    blocks, position = [], 0
    while opening := _FENCE.search(text, position):
        kind, is_python = opening["fence"][0], opening["tag"].lower() in _PYTHON_TAGS
        fences = _FENCE.finditer(text, opening.end())
        closing = (one.span() for one in fences if one["fence"][0] == kind and not one["tag"])
        ends = [*itertools.islice(closing, _MAX_ENDS)] or [(len(text), len(text))]
        bodies = {text[opening.end() + 1 : start]: end for start, end in ends}
        whole = (body for body in bodies if is_python and _parses(textwrap.dedent(body)))
        best = next(whole, next(iter(bodies)))
        blocks += [best] if is_python else []
        position = bodies[best]
    return blocks


def extract_code(
    completion: str, entry_point: str | None = None, *, stub: str = ""
) -> ExtractedCode:
    """Finds the code of an answer: the last fenced block that is suitable, else the whole text.

    Without an entry point it is a program, which must compile; blocks tagged as Python, wherever
    their fences stand on a line, go before others, which often show what it prints. Otherwise it
    must define the entry point: every block, last first, and then the whole text is tried as a
    module; then all of them, indented ones first, as the continuation of ``stub``. Text after the
    code is cut off and, where there are no blocks, prose before it. ``[PYTHON]`` or ``[BEGIN]`` may
    open a block. Functions that the code calls are taken from other blocks. The stub is the
    beginning of the module that the prompt showed and may end within a definition; its imports and
    helpers are always put in front.
    """
    if "```" not in completion:
        completion = _MARK.sub(lambda mark: "```python" if mark[1] else "```", completion)
    texts = _blocks(completion, is_program=entry_point is None)
    pieces = [text for text in dict.fromkeys([*texts, completion]) if text.strip()]
    if not pieces:
        return ExtractedCode(code=None, reason="the completion holds no code")
    # Prose may be in front of code without fences.
    starts = itertools.islice(_START.finditer(completion), _MAX_STARTS if len(pieces) == 1 else 0)
    later = [completion[start.start() :] for start in starts]
    whole = whole_part(stub).rstrip()
    head = f"{whole}\n\n\n" if whole else ""
    if entry_point is None:
        candidates: Iterator[str] = (_behind(head, textwrap.dedent(p)) for p in [*pieces, *later])
    else:
        candidates = _defining(entry_point, pieces, later, head=head, stub=stub)
    if (code := next(filter(_parses, candidates), None)) is not None:
        return ExtractedCode(code=_with_helpers(code, pieces[::-1]))
    if entry_point is not None and any(_parses(textwrap.dedent(piece)) for piece in pieces):
        reason = f"no function {entry_point!r} is defined"
        return ExtractedCode(code=head + textwrap.dedent(pieces[0]), reason=reason)
    return ExtractedCode(
        code=head + pieces[0], reason="the code does not parse", is_syntax_error=True
    )


def _defining(
    entry_point: str, pieces: list[str], later: list[str], *, head: str, stub: str
) -> Iterator[str]:
    """Yields modules that define the entry point, those that need the least guessing first."""
    for piece in pieces:
        yield from (_behind(head, text) for text in _as_module(piece, entry_point))
    # Indented text must be a body; what is not may be one whose indentation was lost.
    for piece in sorted(pieces, key=lambda piece: piece.strip("\n")[0] not in " \t"):
        yield from _as_continuation(stub, piece, entry_point)
    for piece in later:
        yield from (_behind(head, text) for text in _as_module(piece, entry_point))


def _blocks(completion: str, *, is_program: bool) -> list[str]:
    blocks = fenced_blocks(completion)[::-1]
    fenced = "".join(block for block in blocks if "```" in block)  # in docstrings
    tagged = [text for text in _TAGGED.findall(completion)[::-1] if text not in fenced]
    return [*tagged, *blocks] if is_program else [*blocks, *tagged]


def _behind(head: str, text: str) -> str:
    """Joins both, with the text's ``from __future__`` lines first, where Python requires them."""
    return "".join(_FUTURE.findall(text)) + head + _FUTURE.sub("", text)


def _with_helpers(code: str, texts: list[str]) -> str:
    """Puts other blocks that only define functions and classes in front of code that uses one."""
    kinds = ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
    for text in 2 * texts[:_MAX_CUTS]:  # twice: helpers need helpers
        names = {*_DEFINED.findall(text)} - {*_DEFINED.findall(code)}
        is_used = any(re.search(rf"\b{name}\(", code) for name in names)
        if is_used and _parses(text) and all(isinstance(n, kinds) for n in ast.parse(text).body):
            code = _behind("", f"{text}\n\n{code}")
    return code


def _as_module(piece: str, entry_point: str) -> Iterator[str]:
    """Yields the longest beginning of a piece that parses and defines the entry point, if any."""
    for text in _without_tail(textwrap.dedent(piece).strip("\n")):
        if entry_point not in text:
            return
        if _parses(text) and _defines(text, entry_point):
            yield text
            return


def _as_continuation(stub: str, piece: str, entry_point: str) -> Iterator[str]:
    """Yields the stub completed by a piece, which is indented if need be."""
    body = piece.strip("\n").rstrip()
    if not body or not stub.strip():
        return
    start = stub if stub.endswith("\n") else stub + "\n"
    first, _, rest = body.partition("\n")
    bare = textwrap.dedent(body)
    versions = [body] if body[0].isspace() else []
    for margin in dict.fromkeys(("    ", _margin(stub))):
        # Either the first line's indentation was stripped, or the body was written without any.
        versions += [f"{margin}{first}\n{rest}"] if bare == body else []
        versions += [textwrap.indent(bare, margin)]
    for text in itertools.chain(versions, *map(_without_tail, versions)):
        if text.strip() and _parses(start + text):
            if _defines(start + text, entry_point):
                yield start + text
            return


def _margin(stub: str) -> str:
    last = stub.rstrip().rpartition("\n")[2]
    margin = last[: len(last) - len(last.lstrip())]
    return f"{margin}    " if last.endswith(":") else margin


def whole_part(stub: str) -> str:
    """Returns as much of a module's beginning as parses: without an unfinished definition."""
    return next(filter(_parses, _without_tail(stub)), "")


def _without_tail(text: str) -> Iterator[str]:
    """Yields the text, then ever shorter beginnings that end before an unindented line."""
    yield text
    lines = text.splitlines(keepends=True)
    cuts = [i for i, line in enumerate(lines) if i and line[0] not in " \t\n\r#)]}"]
    for cut in list(reversed(cuts))[:_MAX_CUTS]:
        yield "".join(lines[:cut])


def _parses(code: str) -> bool:
    # Compiled, because a bare parse lets a return outside a function through.
    try:
        compile(code, CANDIDATE_FILE, "exec", dont_inherit=True)
    except _NOT_PYTHON:
        return False
    return True


def _defines(code: str, name: str) -> bool:
    """Whether code, which must parse, binds a name at its top level."""
    body = ast.parse(code, CANDIDATE_FILE).body
    targets = (one for node in body if isinstance(node, ast.Assign) for one in node.targets)
    assigned = [target.id for target in targets if isinstance(target, ast.Name)]
    return name in [*assigned, *(getattr(node, "name", None) for node in body)]
