"""Whole programs in completions: finding them, and running them on given standard input."""

from __future__ import annotations

from collections.abc import Sequence

from lit_dlm.grading.code import ExtractedCode, fenced_blocks, ungradable
from lit_dlm.grading.launch import SandboxLimits
from lit_dlm.grading.sandbox import CANDIDATE_FILE, run_python_program
from lit_dlm.grading.verdict import Status, Verdict

MAX_TIMEOUTS = 2
"""A program that ran out of time so often is not started on its other inputs: they fail."""


def extract_program(completion: str) -> ExtractedCode:
    """Finds the program of an answer: the last fenced Python block, else the whole text.

    Blocks that do not compile are passed over while another one does.

    Args:
        completion: What the model wrote.

    Returns:
        The program or the reason why there is none.
    """
    pieces = [block for block in reversed(fenced_blocks(completion)) if block.strip()]
    if not pieces and completion.strip():
        pieces = [completion]
    if not pieces:
        return ExtractedCode(code=None, problem="the completion holds no code")
    for piece in pieces:
        if _compiles(piece):
            return ExtractedCode(code=piece)
    return ExtractedCode(code=pieces[0], problem="the code does not parse", is_syntax_error=True)


def _compiles(code: str) -> bool:
    try:
        compile(code, CANDIDATE_FILE, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return False
    return True


def grade_by_outputs(
    completion: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    limits: SandboxLimits | None = None,
    allow_code_execution: bool,
) -> Verdict:
    """Runs the program of a completion once per input and compares what it prints.

    The expected outputs never leave this process. Outputs are compared word by word: the amount of
    white space does not matter.

    Args:
        completion: What the model wrote.
        inputs: Standard input of each test.
        outputs: Expected standard output of each test.
        limits: What each run may use.
        allow_code_execution: Must be ``True``.

    Returns:
        The verdict; its ``score`` is the share of tests that passed, its ``status`` and ``detail``
        tell of the first that did not.

    Raises:
        ValueError: If code execution was not allowed, there is no test, or the numbers differ.
        SandboxError: If the sandbox cannot be set up on this machine.
    """
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(
            "expected as many outputs as inputs, and at least one, got "
            f"{len(inputs)} inputs and {len(outputs)} outputs"
        )
    found = extract_program(completion)
    if (verdict := ungradable(found)) is not None:
        return verdict
    assert found.code is not None
    failure: tuple[Status, str] | None = None
    num_passed = num_timeouts = 0
    for number, (stdin, expected) in enumerate(zip(inputs, outputs, strict=True), start=1):
        result = run_python_program(
            found.code, stdin, limits=limits, allow_code_execution=allow_code_execution
        )
        status, detail = result.status, result.detail
        if status == "right" and result.stdout.split() != expected.split():
            status, detail = "wrong", "another output was expected"
        num_passed += status == "right"
        if status != "right":
            failure = failure or (status, f"test {number} of {len(inputs)}: {detail}")
        num_timeouts += status == "timeout"
        if num_timeouts >= MAX_TIMEOUTS:
            break
    status, detail = failure or ("right", "")
    return Verdict(status=status, answer=found.code, detail=detail, score=num_passed / len(inputs))
