"""Whole programs in completions, graded by what they print on given standard input."""

from __future__ import annotations

from collections.abc import Sequence

from lit_dlm.grading.code import extract_program, ungradable
from lit_dlm.grading.launch import SandboxLimits
from lit_dlm.grading.sandbox import run_python_program
from lit_dlm.grading.verdict import Status, Verdict

MAX_TIMEOUTS = 2
"""A program that ran out of time so often is not started on its other inputs: they fail."""


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
