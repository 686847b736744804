"""Code in completions: finding it, without compiling it in this process, and running programs."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence

from lit_dlm.grading.bounded import shared_processes
from lit_dlm.grading.child.extraction import CANDIDATE_FILE, ExtractedCode
from lit_dlm.grading.sandbox import SandboxLimits, run_python_program
from lit_dlm.grading.verdict import Status, Verdict

# Compiling can warn (invalid escapes, comparisons of literals), which does not matter here; turned
# into errors, warnings would change verdicts. Only this file name is affected.
warnings.filterwarnings("ignore", module=re.escape(CANDIDATE_FILE))

_EXTRACTION_SECONDS = 10.0
MAX_TIMEOUTS = 2
"""A program that timed out this often is not run on its remaining inputs, which fail."""


def python_block(code: str) -> str:
    """Writes code as one fenced Python block."""
    return f"```python\n{code.strip()}\n```"


def extract_code(
    completion: str, entry_point: str | None = None, *, stub: str = ""
) -> ExtractedCode:
    """Runs :func:`.child.extraction.extract_code` in bounded time and memory."""
    question = {"completion": completion, "entry_point": entry_point, "stub": stub}
    answer = shared_processes("extraction").ask(question, seconds=_EXTRACTION_SECONDS)
    if answer is None:
        reason = "the code cannot be parsed in bounded time and memory"
        return ExtractedCode(code=None, reason=reason, is_syntax_error=True)
    return ExtractedCode(**answer)


def grade_by_outputs(
    code: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    by_line: bool = False,
    limits: SandboxLimits | None = None,
    allow_code_execution: bool,
) -> Verdict:
    """Runs a program once per input, within ``limits``, and compares what it prints.

    The expected outputs never leave this process. Outputs are compared word by word: the amount of
    white space does not matter, but with ``by_line`` line breaks do. The verdict's ``score`` is the
    share of tests that passed, its ``status`` and ``detail`` are those of the first that did not.
    """
    failures: list[tuple[Status, str]] = []
    for number, (stdin, expected) in enumerate(zip(inputs, outputs, strict=True), start=1):
        result = run_python_program(
            code,
            stdin,
            output_bytes=max(1 << 20, 2 * len(expected.encode())),  # room for white space
            limits=limits,
            allow_code_execution=allow_code_execution,
        )
        status, detail = result.status, result.detail
        printed, wanted = (
            [line.split() for line in (text.strip().split("\n") if by_line else [text])]
            for text in (str(result.answer), expected)
        )
        if status == "right" and printed != wanted:
            status, detail = "wrong", "another output was expected"
        if status != "right":
            failures.append((status, f"test {number} of {len(inputs)}: {detail}"))
        # A program that hangs does so on most inputs, and a problem may have a hundred of them.
        if [one for one, _ in failures].count("timeout") >= MAX_TIMEOUTS:
            break
    num_passed = number - len(failures)
    status, detail = failures[0] if failures else ("right", "")
    return Verdict(status=status, answer=code, detail=detail, score=num_passed / len(inputs))


def ungradable(extracted: ExtractedCode) -> Verdict | None:
    """Returns the verdict on code that cannot be run, or ``None`` if it can."""
    if not extracted.reason:
        return None
    status: Status = "syntax_error" if extracted.is_syntax_error else "no_answer"
    return Verdict(status=status, answer=extracted.code, detail=extracted.reason)
