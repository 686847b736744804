"""Starts the sandbox's processes, takes their results in, and makes sure that nothing is left.

One driver process per job, started with an empty environment in its own session; see
:mod:`.child.driver` for what it does. A result counts only if it carries the nonce of this run.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from lit_dlm.grading.child import isolate, wire

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


def run_job(job: dict[str, Any], limits: SandboxLimits) -> tuple[dict[str, Any], list[bytes]]:
    """Runs one job in a driver at the best isolation level there is.

    Args:
        job: What the driver reads: ``mode`` (``check``, ``calls`` or ``program``) and its data.
        limits: What the candidate may use.

    Returns:
        The head of the result (``status`` and ``detail`` at least) and the encoded replies.

    Raises:
        SandboxError: If the sandbox cannot be set up.
    """
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
