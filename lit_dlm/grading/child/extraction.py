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
_FUTURE = re.compile(r"^from __future__ import [^\n]*\n?", re.MULTILINE)
_PYTHON_TAGS = {"", "python", "py", "python3", "python2", "py3"}
_NOT_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError)
# Number of places tried for cutting off trailing text; each costs one parse.
_MAX_CUTS = 40


@dataclass(frozen=True, kw_only=True)
class ExtractedCode:
    """Code found in a completion."""

    code: str | None  # the code to run or, where there is a problem, the best that was found
    problem: str = ""  # why it cannot be graded: no code, a syntax error or a missing entry point
    is_syntax_error: bool = False


def fenced_blocks(text: str) -> list[str]:
    """The contents of all fenced Python blocks, in order; an unclosed last one runs to the end."""
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


def extract_code(
    completion: str, entry_point: str | None = None, *, stub: str = ""
) -> ExtractedCode:
    """Finds the code of an answer: the last fenced block that is suitable, else the whole text.

    Without an entry point it is a program, which must compile; blocks tagged as Python, wherever
    their fences stand on a line, go before others, which often show what it prints. Otherwise it
    must define the entry point: every block, last first, and then the whole text is tried as a
    module; then all of them, indented ones first, as the continuation of ``stub``. Text after the
    code is cut off. The stub is the beginning of the module that the prompt showed and may end
    within a definition; its imports and helpers are always put in front.
    """
    blocks, tagged = fenced_blocks(completion)[::-1], _TAGGED.findall(completion)[::-1]
    texts = [*blocks, *tagged] if entry_point is not None else [*tagged, *blocks]
    pieces = [text for text in dict.fromkeys([*texts, completion]) if text.strip()]
    if not pieces:
        return ExtractedCode(code=None, problem="the completion holds no code")
    whole = whole_part(stub).rstrip()
    head = f"{whole}\n\n\n" if whole else ""
    found: Iterator[str] = (_behind(head, textwrap.dedent(piece)) for piece in pieces)
    if entry_point is not None:
        by_indent = sorted(pieces, key=lambda piece: piece.strip("\n")[0] not in " \t")
        found = itertools.chain(
            (_behind(head, text) for piece in pieces for text in _as_module(piece, entry_point)),
            (code for piece in by_indent for code in _as_continuation(stub, piece, entry_point)),
        )
    if (code := next(filter(_parses, found), None)) is not None:
        return ExtractedCode(code=code)
    if entry_point is not None and any(_parses(textwrap.dedent(piece)) for piece in pieces):
        problem = f"no function {entry_point!r} is defined"
        return ExtractedCode(code=head + textwrap.dedent(pieces[0]), problem=problem)
    return ExtractedCode(
        code=head + pieces[0], problem="the code does not parse", is_syntax_error=True
    )


def _behind(head: str, text: str) -> str:
    """Joins both, with the text's ``from __future__`` lines first, where Python requires them."""
    return "".join(_FUTURE.findall(text)) + head + _FUTURE.sub("", text)


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
