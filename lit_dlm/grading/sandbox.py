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

from lit_dlm.grading.launch import SandboxLimits, run_job
from lit_dlm.grading.verdict import Verdict


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
    if not check.strip():
        raise ValueError("check: expected at least one test, got none")
    for name, source in (("check", check), ("preamble", preamble)):
        # Otherwise it would be the candidate's loss.
        try:
            compile(source, f"<{name}>", "exec", dont_inherit=True)
        except SyntaxError as error:
            raise ValueError(f"{name}: expected Python, got {error.msg} ({error.text})") from None
    job = {
        "mode": "check",
        "code": code,
        "check": check,
        "entry_point": entry_point,
        "preamble": preamble,
    }
    head = run_job(job, limits or SandboxLimits())
    score = head["passed"] / head["total"] if head.get("total") else None
    return Verdict(status=head["status"], answer=code, detail=head["detail"], score=score)


def run_python_program(
    code: str,
    stdin: str,
    *,
    limits: SandboxLimits | None = None,
    allow_code_execution: bool,
) -> Verdict:
    """Runs untrusted code as ``__main__``; ``sys.exit(0)`` counts as a normal end.

    ``answer`` is what it printed; empty unless ``status`` is ``right``: it ended without an error.
    """
    require_permission(allow_code_execution)
    head = run_job({"mode": "program", "code": code, "stdin": stdin}, limits or SandboxLimits())
    return Verdict(status=head["status"], answer=head.get("stdout", ""), detail=head["detail"])


def require_permission(allow_code_execution: bool, *, of: str = "allow_code_execution") -> None:
    """Refuses to go on unless running code was explicitly allowed."""
    if allow_code_execution is not True:
        raise ValueError(
            f"{of}: grading runs model-written code; set allow_code_execution: true in the task to "
            "allow it"
        )
