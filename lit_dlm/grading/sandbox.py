"""Runs model-written Python where it can neither do harm nor grade itself.

Each sample gets two processes behind walls of their own (:mod:`.child.isolate`): the *driver*, a
bare ``python -I -S`` with an empty environment, forks a *worker* and only then reads the tests. The
worker runs the candidate and answers calls; the tests run in the driver against proxies, so
``sys.exit``, printed markers, forged ``__eq__`` methods and reading frames have nothing to act on:
the candidate's process holds no test, no expected value and no nonce, and the driver rebuilds
results as exact builtin types. Nothing that a candidate wrote is compiled, taken apart or compared
in the process of the run. ``SECURITY.md`` says what it is worth where.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from lit_dlm.grading.launch import SandboxLimits, run_job
from lit_dlm.grading.verdict import Status, Verdict


@dataclass(frozen=True, kw_only=True)
class ProgramResult:
    """What a program run with given standard input did."""

    status: Status
    """``right`` if it ended by itself without an error."""
    detail: str
    stdout: str
    """What it printed; empty unless ``status`` is ``right``."""


def run_python_check(
    code: str,
    check: str,
    entry_point: str,
    *,
    limits: SandboxLimits | None = None,
    allow_code_execution: bool,
    preamble: str = "",
) -> Verdict:
    """Grades Python code by running tests against it.

    Args:
        code: The candidate, untrusted: a module that defines ``entry_point``.
        check: The tests, trusted: either top-level assertions that call ``entry_point`` or a
            function ``check(candidate)`` that does. Of assertions ``score`` is the share that
            passed.
        entry_point: Name of the function under test.
        limits: What the sample may use.
        allow_code_execution: Must be ``True``, the caller's word that running code is wanted.
        preamble: Trusted code that runs before the tests, outside the candidate: imports and
            helper functions the tests use. The candidate cannot replace what it defines.
    """
    require_permission(allow_code_execution)
    for name, source in (("check", check), ("preamble", preamble)):
        _require_valid_source(name, source)
    if not check.strip():
        raise ValueError("check must hold at least one test, got an empty text")
    job = {
        "mode": "check",
        "code": code,
        "check": check,
        "entry_point": entry_point,
        "preamble": preamble,
    }
    head, _ = run_job(job, limits or SandboxLimits())
    total = head.get("total")
    return Verdict(
        status=cast(Status, head["status"]),
        answer=code,
        detail=head["detail"],
        score=head["passed"] / total if total else None,
    )


def run_python_program(
    code: str,
    stdin: str,
    *,
    limits: SandboxLimits | None = None,
    allow_code_execution: bool,
) -> ProgramResult:
    """Runs untrusted code as ``__main__``; ``sys.exit(0)`` counts as a normal end."""
    require_permission(allow_code_execution)
    job = {"mode": "program", "code": code, "stdin": stdin}
    head, _ = run_job(job, limits or SandboxLimits())
    return ProgramResult(
        status=cast(Status, head["status"]), detail=head["detail"], stdout=head.get("stdout", "")
    )


def require_permission(allow_code_execution: bool) -> None:
    """Refuses to go on unless running code was explicitly allowed."""
    if allow_code_execution is not True:
        raise ValueError(
            "grading this task runs model-written code: set allow_code_execution: true to allow "
            f"it (got {allow_code_execution!r})"
        )


def _require_valid_source(name: str, source: str) -> None:
    try:
        compile(source, f"<{name}>", "exec", dont_inherit=True)
    except SyntaxError as error:
        raise ValueError(
            f"{name} must be valid Python, got a syntax error: {error.msg} (line {error.lineno})"
        ) from None
