"""Runs model-written Python where it can neither do harm nor grade itself.

Each sample gets a bare ``python -I -S`` of its own, the *driver*, started with an empty
environment in its own session. The driver forks a *worker* behind walls (:mod:`.child.isolate`)
and only then reads the tests. The worker runs the candidate and answers calls; the tests run in
the driver against proxies, so ``sys.exit``, printed markers, forged ``__eq__`` methods and reading
frames have nothing to act on: the candidate's process holds no test, no expected value and no
nonce, and the driver rebuilds results as exact builtin types. The parent accepts a result only if
it carries the nonce of this very run.

This is a strong fence, not a virtual machine. :func:`isolation_level` says how strong; at level
``process`` (no user namespaces) the candidate can read what other users may read.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

from lit_dlm.grading.child import isolate, wire
from lit_dlm.grading.verdict import Status, Verdict

logger = logging.getLogger(__name__)

IsolationLevel = Literal["namespaces", "process"]

_BOOT = (
    "import sys, types; package = types.ModuleType('sandbox_child'); "
    "package.__path__ = [sys.argv.pop(2)]; sys.modules['sandbox_child'] = package; "
    "from sandbox_child.driver import main; main()"
)
_GRACE_SECONDS = 10.0
"""Time for interpreter start and clean-up on a busy machine, outside the candidate's own limit."""

_FIRST_USER = 2_100_000_000
_USERS = 1_000_000
_next_user = itertools.count(os.getpid() * 1000)


class SandboxError(RuntimeError):
    """The sandbox itself failed; says nothing about the candidate."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """What one sample may use. Exceeding any limit is a wrong answer, never an error here."""

    wall_seconds: float = 10.0
    """Wall time for loading the code and all tests together."""
    cpu_seconds: float = 10.0
    """Processor time of the candidate, rounded up to whole seconds."""
    memory_bytes: int = 1 << 30
    """Address space of each process."""
    output_bytes: int = 1 << 20
    """Captured standard output of a program; more is refused."""
    value_bytes: int = 1 << 25
    """Largest argument or returned value."""
    file_bytes: int = 0
    """Size of the private ``/tmp``; 0 means that no file can be made or changed at all."""
    processes: int = 1
    """Processes; 1 means that none can be started (a few threads always can)."""

    def __post_init__(self) -> None:
        for name, least in (
            ("wall_seconds", 0.01),
            ("cpu_seconds", 0.01),
            ("memory_bytes", 1 << 26),
            ("output_bytes", 0),
            ("value_bytes", 1 << 10),
            ("file_bytes", 0),
            ("processes", 1),
        ):
            value = getattr(self, name)
            if not value >= least:
                raise ValueError(f"SandboxLimits.{name} must be at least {least}, got {value!r}")


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
    head, _ = _run_job(job, limits or SandboxLimits())
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
    head, replies = _run_job(job, limits or SandboxLimits())
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
    head, _ = _run_job(job, limits or SandboxLimits())
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


@functools.cache
def isolation_level() -> IsolationLevel:
    """Probes once what the kernel allows here and logs it.

    Returns:
        ``namespaces`` (own file system view, processes and network, all torn down together) or
        ``process`` (resource limits, a system-call filter and, for root, a user id per sample).

    Raises:
        SandboxError: If not even a limited process can be started.
    """
    levels: tuple[IsolationLevel, ...] = ("namespaces", "process")
    for level in levels:
        try:
            _probe(level, user=None)
        except SandboxError as error:
            logger.debug("isolation level %s is not available: %s", level, error)
            continue
        if level == "process":
            logger.warning(
                "user namespaces are not available: model-written code runs under resource limits "
                "and a system-call filter only, in your file system view"
            )
        else:
            logger.info("model-written code runs in its own namespaces")
        return level
    raise SandboxError("no sandboxed Python process can be started on this machine")


@functools.cache
def _can_change_user() -> bool:
    """Whether a root parent can run each sample under a user id that owns nothing."""
    if os.geteuid() != 0:
        return False
    try:
        _probe("process", user=_FIRST_USER)
    except SandboxError as error:
        logger.debug("samples keep the parent's user id: %s", error)
        return False
    return True


def _probe(level: IsolationLevel, *, user: int | None) -> None:
    job = {
        "mode": "check",
        # A module that is not loaded yet: the interpreter's files must be readable in there.
        "code": "import fractions\ndef half(n):\n    return float(fractions.Fraction(n, 2))",
        "check": "assert half(1) == 0.5",
        "entry_point": "half",
        "preamble": "",
    }
    head, _ = _run_driver(job, SandboxLimits(), level=level, user=user)
    if head["status"] != "right":
        raise SandboxError(f"probe: {head['status']}: {head['detail']}")


def _run_job(job: dict[str, Any], limits: SandboxLimits) -> tuple[dict[str, Any], list[bytes]]:
    level = isolation_level()
    user = None
    if level == "process" and _can_change_user():
        user = _FIRST_USER + 1 + next(_next_user) % _USERS
    return _run_driver(job, limits, level=level, user=user)


def _run_driver(
    job: dict[str, Any], limits: SandboxLimits, *, level: IsolationLevel, user: int | None
) -> tuple[dict[str, Any], list[bytes]]:
    """Starts one driver, waits for it, makes sure that nothing of it is left.

    Returns:
        The head of the result (``status`` and ``detail`` at least) and the encoded replies.
    """
    nonce = secrets.token_hex(16)
    scratch = tempfile.mkdtemp(prefix="lit-dlm-sandbox-")
    if user is not None:
        os.chown(scratch, user, user)
    config = {
        **asdict(limits),
        "grace_seconds": _GRACE_SECONDS,
        "level": level,
        "user": user,
        "scratch": os.path.realpath(scratch),
        "library_paths": _library_paths(),
        "shown_folders": _shown_folders(),
    }
    child_folder = str(Path(isolate.__file__).parent)
    command = [sys.executable, "-I", "-S", "-X", "utf8", "-c", _BOOT]
    command += [json.dumps(config), child_folder]
    # Only what the dynamic loader may need to start this interpreter; the worker drops it too.
    environment = {k: v for k, v in os.environ.items() if k == "LD_LIBRARY_PATH"}
    try:
        driver = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            cwd=scratch,
            start_new_session=True,
        )
        try:
            text = json.dumps({**job, "nonce": nonce}).encode()
            timeout = limits.wall_seconds + 2 * _GRACE_SECONDS
            output, errors = driver.communicate(text, timeout=timeout)
        except subprocess.TimeoutExpired:
            return {"status": "timeout", "detail": "the tests did not end in time"}, []
        finally:
            _kill_tree(driver)
    finally:
        shutil.rmtree(scratch)
    return _read_result(output, nonce, driver.returncode, errors)


def _read_result(
    output: bytes, nonce: str, returncode: int, errors: bytes
) -> tuple[dict[str, Any], list[bytes]]:
    try:
        messages = wire.unpack(output)
        head = wire.parse(messages[0]) if messages else None
    except wire.WireError:
        head = None
    if head is None and returncode in (124, -signal.SIGALRM):
        return {"status": "timeout", "detail": "the tests did not end in time"}, []
    if head is None and returncode == -signal.SIGKILL:
        return {"status": "runtime_error", "detail": "the machine killed the tests"}, []
    if head is None:
        last = errors.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        if "MemoryError" in last[0]:
            return {"status": "runtime_error", "detail": "the tests ran out of memory"}, []
        raise SandboxError(f"the driver ended with exit code {returncode}: {last[0]}")
    if not secrets.compare_digest(str(head.get("nonce")), nonce):
        return {"status": "runtime_error", "detail": "the result is not of this run"}, []
    if head["status"] == "setup_error":
        raise SandboxError(head["detail"])
    return head, messages[1:]


def _kill_tree(driver: subprocess.Popen[bytes]) -> None:
    """Ends a driver and all below it; a driver that ended by itself has done so already.

    The driver is stopped first: it stays the parent of every orphan below it, so nothing can
    leave the tree while it is taken down.
    """
    if driver.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(driver.pid, signal.SIGSTOP)
        for _ in range(200):
            living = [pid for pid in isolate.descendants(driver.pid) if not _is_zombie(pid)]
            for pid in living:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not living:
                break
            time.sleep(0.005)
        driver.kill()
    for stream in (driver.stdin, driver.stdout, driver.stderr):
        if stream is not None:
            stream.close()
    driver.wait()


def _is_zombie(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == b"Z"


def _refuse_early(code: str) -> Verdict | None:
    """Code that cannot even be written down as UTF-8 or compiled needs no process."""
    try:
        code.encode()
        compile(code, "<candidate>", "exec", dont_inherit=True)
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


@functools.cache
def _library_paths() -> list[str]:
    """Folders of installed packages, importable by the candidate."""
    paths = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    return [path for path in paths if path and os.path.isdir(path)]


@functools.cache
def _shown_folders() -> list[str]:
    """Folders outside the system's own that the interpreter and its packages live in."""
    prefixes = [sys.base_prefix, sys.base_exec_prefix, *_library_paths()]
    real = [os.path.realpath(folder) for folder in prefixes]
    # Parents sort before their children, which are then already in view.
    return sorted({*prefixes, *real} - {"/"})
