"""Runs model-written Python where it can neither do harm nor grade itself.

Each sample gets a bare ``python -I -S`` of its own, the *driver*, started with an empty
environment in its own session. The driver forks a *worker* behind walls (:mod:`.child.isolate`)
and only then reads the tests. The worker runs the candidate and answers calls; the tests run in
the driver against proxies, so ``sys.exit``, printed markers, forged ``__eq__`` methods and reading
frames have nothing to act on: the candidate's process holds no test, no expected value and no
nonce, and the driver rebuilds results as exact builtin types. The parent accepts a result only if
it carries the nonce of this very run.

This is a strong fence, not a virtual machine. :func:`~lit_dlm.grading.isolation_level` says how
strong; at level ``process`` (no user namespaces) the candidate can read what other users may read.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from lit_dlm.grading.child import wire
from lit_dlm.grading.launch import SandboxLimits, run_job
from lit_dlm.grading.verdict import Status, Verdict

CANDIDATE_FILE = "<candidate>"
"""File name under which model-written code is compiled."""
# Compiling can warn (invalid escapes, comparisons of literals): no concern of ours, and as an error
# it would change verdicts. Only this file name is affected.
warnings.filterwarnings("ignore", module=re.escape(CANDIDATE_FILE))


@dataclass(frozen=True, kw_only=True)
class CallReplies:
    """What the candidate returned for a list of inputs, up to the first call that did not end."""

    status: Status
    """``right`` if every call came back (with a value or an exception)."""
    detail: str
    """Why the run stopped early, else empty."""
    replies: list[bytes]
    """One encoded reply per finished call, in order; see :func:`read_reply`."""
    seconds: list[float]
    """Wall time of each finished call."""


@dataclass(frozen=True, kw_only=True)
class ProgramResult:
    """What a program run with given standard input did."""

    status: Status
    """``right`` if it ended by itself without an error."""
    detail: str
    """The exception or the limit, else empty."""
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
            function ``check(candidate)`` that does.
        entry_point: Name of the function under test.
        limits: What the sample may use; ``None`` takes the defaults.
        allow_code_execution: Must be ``True``, the caller's word that running code is wanted.
        preamble: Trusted code that runs before the tests, outside the candidate: imports and
            helper functions the tests use. The candidate cannot replace what it defines.

    Returns:
        The verdict, with ``code`` as answer. For top-level assertions ``score`` is the share that
        passed.

    Raises:
        ValueError: If code execution was not allowed, or the tests are empty or do not parse.
        SandboxError: If the sandbox cannot be set up on this machine.
    """
    require_permission(allow_code_execution)
    for name, source in (("check", check), ("preamble", preamble)):
        _require_valid_source(name, source)
    if not check.strip():
        raise ValueError("check must hold at least one test, got an empty text")
    early = _refuse_early(code)
    if early is not None:
        return early
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


def run_python_calls(
    code: str,
    entry_point: str,
    calls: Sequence[Sequence[Any]],
    *,
    call_seconds: Sequence[float] | float = 1.0,
    limits: SandboxLimits | None = None,
    allow_code_execution: bool,
) -> CallReplies:
    """Calls a function of untrusted code on many inputs; comparing is left to the caller.

    Args:
        code: The candidate, a module that defines ``entry_point``.
        entry_point: Name of the function.
        calls: One list of positional arguments per call.
        call_seconds: Wall time of each call, one number or one per call.
        limits: What the whole run may use; ``None`` takes the defaults.
        allow_code_execution: Must be ``True``.

    Returns:
        The replies that came back.

    Raises:
        ValueError: If code execution was not allowed or the lengths differ.
        SandboxError: If the sandbox cannot be set up on this machine.
    """
    require_permission(allow_code_execution)
    seconds = [call_seconds] * len(calls) if isinstance(call_seconds, int | float) else call_seconds
    if len(seconds) != len(calls):
        raise ValueError(f"call_seconds must have one number for each of {len(calls)} calls")
    early = _refuse_early(code)
    if early is not None:
        return CallReplies(status=early.status, detail=early.detail, replies=[], seconds=[])
    job = {
        "mode": "calls",
        "code": code,
        "entry_point": entry_point,
        "calls": [wire.encode(tuple(args)) for args in calls],
        "call_seconds": list(seconds),
    }
    head, replies = run_job(job, limits or SandboxLimits())
    return CallReplies(
        status=cast(Status, head["status"]),
        detail=head["detail"],
        replies=replies,
        seconds=head.get("taken", []),
    )


def run_python_program(
    code: str,
    stdin: str,
    *,
    limits: SandboxLimits | None = None,
    allow_code_execution: bool,
) -> ProgramResult:
    """Runs untrusted code as a program with given standard input.

    Args:
        code: The candidate, run as ``__main__``; ``sys.exit(0)`` counts as a normal end.
        stdin: What it can read.
        limits: What the run may use; ``None`` takes the defaults.
        allow_code_execution: Must be ``True``.

    Returns:
        How it ended and what it printed; the caller compares.

    Raises:
        ValueError: If code execution was not allowed.
        SandboxError: If the sandbox cannot be set up on this machine.
    """
    require_permission(allow_code_execution)
    early = _refuse_early(code)
    if early is not None:
        return ProgramResult(status=early.status, detail=early.detail, stdout="")
    job = {"mode": "program", "code": code, "stdin": stdin}
    head, _ = run_job(job, limits or SandboxLimits())
    return ProgramResult(
        status=cast(Status, head["status"]), detail=head["detail"], stdout=head.get("stdout", "")
    )


def read_reply(
    reply: bytes, *, from_handle: Callable[[int], Any] | None = None
) -> tuple[bool, Any]:
    """Opens one reply of :func:`run_python_calls`.

    Args:
        reply: As stored in ``CallReplies.replies``.
        from_handle: Makes what stands for a value that cannot leave the sandbox; without it such
            a value counts as an error.

    Returns:
        ``(True, value)``, made of builtin types, or ``(False, "Type: message")`` for an exception
        or a value that cannot leave the sandbox.
    """
    try:
        message = wire.parse(reply)
        if "error" in message:
            return False, ": ".join(str(part) for part in message["error"])
        return True, wire.decode(message["value"], from_handle=from_handle)
    except wire.WireError as error:
        return False, str(error)


def require_permission(allow_code_execution: bool) -> None:
    """Refuses to go on unless running code was explicitly allowed.

    Raises:
        ValueError: If ``allow_code_execution`` is not ``True``.
    """
    if allow_code_execution is not True:
        raise ValueError(
            "grading this task runs model-written code: set allow_code_execution: true to allow "
            f"it (got {allow_code_execution!r})"
        )


def _refuse_early(code: str) -> Verdict | None:
    """Code that cannot even be written down as UTF-8 or compiled needs no process."""
    try:
        code.encode()
        compile(code, CANDIDATE_FILE, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        line = f" (line {error.lineno})" if isinstance(error, SyntaxError) else ""
        detail = f"{type(error).__name__}: {message}{line}"
        return Verdict(status="syntax_error", answer=code, detail=detail)
    return None


def _require_valid_source(name: str, source: str) -> None:
    try:
        compile(source, f"<{name}>", "exec", dont_inherit=True)
    except SyntaxError as error:
        raise ValueError(
            f"{name} must be valid Python, got a syntax error: {error.msg} (line {error.lineno})"
        ) from None
