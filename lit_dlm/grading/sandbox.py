"""Runs model-written Python where it can neither do harm nor grade itself.

Each sample gets two processes behind walls of their own (:mod:`.child.isolate`): the *driver*, a
bare ``python -I -S`` without the run's environment, forks a *worker*, then reads the tests. The
worker runs the candidate and answers calls; the tests run in the driver against proxies, so
``sys.exit``, printed markers, forged ``__eq__`` methods and reading frames have nothing to act on:
the candidate's process holds no test, no expected value and no nonce, and the driver rebuilds
results as plain values. Nothing that a candidate wrote is compiled, parsed or compared in
the run's own process. ``SECURITY.md`` says how much protection this gives on which system.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from lit_dlm.grading.cgroups import memory_cgroup
from lit_dlm.grading.child import isolate
from lit_dlm.grading.child.driver import READY
from lit_dlm.grading.verdict import Verdict
from lit_dlm.system.options import at_least

logger = logging.getLogger(__name__)

IsolationMethod = Literal["bubblewrap", "namespaces", "landlock"]
IsolationLevel = Literal["namespaces", "landlock"]
METHODS: tuple[IsolationMethod, ...] = get_args(IsolationMethod)

CHILD_FOLDER = str(Path(isolate.__file__).resolve().parent)
BOOT = (
    "import sys, types; from importlib import import_module; "
    "package = types.ModuleType('sandbox_child'); package.__path__ = [sys.argv.pop(1)]; "
    "sys.modules['sandbox_child'] = package; "
    "import_module('sandbox_child.' + sys.argv.pop(1)).main()"
)
"""Runs ``main`` of a module of :mod:`.child` in a bare interpreter, as a package of its own."""

# Time for interpreter start and walls on a busy machine, outside the candidate's own limit.
_SETUP_SECONDS = 30.0
_TIMEOUT = {"status": "timeout", "detail": "the tests did not end in time"}

# What a sample's memory cgroup may hold beyond its limit: the driver and the temporary folder.
_BESIDE_BYTES = 1 << 26
# bubblewrap starts processes at once, which must be in the cgroup, so a shell waits before it. The
# driver waits by itself.
_HELD = ["/bin/sh", "-c", 'read -r _; exec "$@"', "sh"]

_next_user = itertools.count(os.getpid() * 1000)


class SandboxError(OSError):
    """The sandbox itself failed; says nothing about the candidate."""


class _KilledError(SandboxError):
    """A process of the sandbox was killed from outside."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """What one sample may use. Exceeding any limit is a wrong answer, never an error here.

    A sample can start threads but no process. Where there are namespaces it has its own temporary
    folder of 8 MiB; it can write no other file.
    """

    wall_seconds: float = 10.0  # wall time for loading the code and all tests together
    call_seconds: float = math.inf  # wall time for loading, and for each call in assertions
    cpu_seconds: float = 10.0  # processor time of the candidate, rounded up to whole seconds
    memory_bytes: int = 1 << 30
    """Address space of the candidate, and of the process that runs the tests. Where memory cgroups
    can be made, this plus 64 MiB also limits what both, and the kernel on their behalf, hold."""
    value_bytes: int = 1 << 25  # largest argument or returned value

    def __post_init__(self) -> None:
        of = "SandboxLimits."
        at_least(0.01, of=of, wall_seconds=self.wall_seconds, cpu_seconds=self.cpu_seconds)
        at_least(0.01, of=of, call_seconds=self.call_seconds)
        at_least(1 << 26, of=of, memory_bytes=self.memory_bytes)
        at_least(1 << 10, of=of, value_bytes=self.value_bytes)


@functools.cache
def isolation_method() -> IsolationMethod:
    """Returns the strongest method that this machine allows; probed once, and logged.

    That is ``bubblewrap`` or ``namespaces`` (own file system view, processes and network), or
    ``landlock`` (only the interpreter's files can be opened; under root, also its own user id).
    """
    reasons = []
    for method in METHODS:
        try:
            probe(method)
        except SandboxError as error:
            reasons.append(f"{method}: {error}")
            continue
        if method == "landlock":
            message = "model-written code runs without namespaces (%s), see SECURITY.md"
            logger.warning(message, "; ".join(reasons))
        else:
            logger.info("model-written code runs in its own namespaces (%s)", method)
        return method
    raise SandboxError(f"no sandbox can be set up on this machine: {'; '.join(reasons)}")


def isolation_level() -> IsolationLevel:
    """Returns what :func:`isolation_method` guarantees, whichever method it is."""
    return "landlock" if isolation_method() == "landlock" else "namespaces"


def probe(method: IsolationMethod) -> None:
    """Runs a small test behind the walls of one method."""
    # A module that is not loaded yet: the interpreter's files must be readable in there.
    code = "import statistics\ndef half(n):\n    return statistics.mean([0, n])"
    head = _run_driver(_check_job(code, "assert half(1) == 0.5", "half"), SandboxLimits(), method)
    if head["status"] != "right":
        raise SandboxError(f"the probe gave {head['status']}: {head['detail']}")


def _check_job(code: str, check: str, entry_point: str, preamble: str = "") -> dict[str, Any]:
    return {
        "mode": "check",
        "code": code,
        "check": check,
        "entry_point": entry_point,
        "preamble": preamble,
    }


def run_job(job: dict[str, Any], limits: SandboxLimits) -> dict[str, Any]:
    """Runs a job of a ``mode`` of :mod:`.child.driver`; returns at least ``status``, ``detail``."""
    method, begin = isolation_method(), time.monotonic()
    try:
        return _run_driver(job, limits, method)
    except _KilledError as error:  # candidates cannot send signals
        logger.warning("a sandbox %s, as when memory runs out; grading its sample again", error)
    # The first try's time counts: a sample that gets itself killed gains none.
    left = max(0.01, limits.wall_seconds - (time.monotonic() - begin))
    try:
        return _run_driver(job, replace(limits, wall_seconds=left), method)
    except _KilledError as error:
        return {"status": "runtime_error", "detail": f"the sandbox {error} twice"}


def _run_driver(
    job: dict[str, Any], limits: SandboxLimits, method: IsolationMethod
) -> dict[str, Any]:
    # The driver learns it after the fork: nothing that the worker prints can contain it.
    nonce = secrets.token_hex(16)
    user = _spare_user()
    # The driver gives up root once it has mounted the interpreter's files, wherever they are. If
    # root may not mount, the driver is another user from the start, who may make a user namespace.
    early = user is not None and (method == "landlock" or not _may_mount())
    config = {
        **asdict(limits),
        "level": method,
        "mode": job["mode"],
        "setup_seconds": _SETUP_SECONDS,
        "user": None if early else user,
        "others_tasks": None if method != "landlock" or user is not None else _num_tasks(),
        "parent": os.getpid(),
        "folders": _shown_folders(),
        "library_paths": _library_paths(),
    }
    with (
        memory_cgroup(limits.memory_bytes + _BESIDE_BYTES) as add_to_cgroup,
        _started_driver(config, method, user=user if early else None) as driver,
    ):
        try:
            add_to_cgroup(driver.pid)
            begin = b"\n\n" if method == "bubblewrap" else b"\n"
            sent = begin + json.dumps({**job, "nonce": nonce}).encode()
            timeout = _SETUP_SECONDS + limits.wall_seconds + 5.0  # the driver's alarm is first
            output, errors = driver.communicate(sent, timeout=timeout)
        except subprocess.TimeoutExpired:
            return dict(_TIMEOUT)
        finally:
            driver.kill()
    if driver.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL):
        raise _KilledError("was killed")
    return _read_result(output, nonce, driver.returncode, errors)


def _started_driver(
    config: dict[str, Any], method: IsolationMethod, *, user: int | None
) -> subprocess.Popen[bytes]:
    command = [*_HELD, *_bubblewrap()] if method == "bubblewrap" else []
    command += [os.path.realpath(sys.executable), "-I", "-S", "-X", "utf8", "-c", BOOT]
    command += [CHILD_FOLDER, "driver", json.dumps(config)]
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=bare_environment(),
            cwd="/",
            start_new_session=True,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        )
    except OSError as error:
        whom = ": " if user is None else ", for a user other than root: "
        raise SandboxError(f"{error.strerror}{whom}{command[0]}") from error


def bare_environment() -> dict[str, str]:
    """Returns what the dynamic loader may need to start this interpreter; workers drop it."""
    return {k: v for k, v in os.environ.items() if k == "LD_LIBRARY_PATH"}


def _read_result(output: bytes, nonce: str, returncode: int, errors: bytes) -> dict[str, Any]:
    code = returncode if returncode >= 0 else 128 - returncode
    last = (errors.decode(errors="replace").strip().splitlines() or [f"exit code {code}"])[-1]
    if not output.startswith(READY):
        raise SandboxError(last)
    try:
        head: dict[str, Any] = json.loads(output[len(READY) :])
    except ValueError:  # it was ended before it could report
        if code == 128 + signal.SIGALRM:
            return dict(_TIMEOUT)
        if code > 128:
            last = f"ended by {signal.Signals(code - 128).name}"
        return {"status": "runtime_error", "detail": f"the tests broke off: {last[:400]}"}
    if not secrets.compare_digest(str(head.pop("nonce", None)), nonce):
        return {"status": "runtime_error", "detail": "the result is not of this run"}
    return head


def _spare_user() -> int | None:
    """Returns, for root, a user id that owns nothing, a different one for each sample."""
    if os.geteuid() != 0:
        return None
    # In a container not all ids exist; the last of those that do belong to nobody.
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    end = min(max(int(start) + int(count) for start, _, count in ranges), 2_100_000_000)
    # A root with no id but its own is an ordinary user outside the container.
    return end - 1 - next(_next_user) % (end // 20) if end > 1000 else None


def _num_tasks() -> int:
    """Returns the number of threads on the whole machine: no user has more."""
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])


def _may_mount() -> bool:
    """Whether we have CAP_SYS_ADMIN, which containers often deny to root."""
    status = Path("/proc/self/status").read_text()
    return bool(int(status.partition("CapEff:")[2].split()[0], 16) >> 21 & 1)


def _bubblewrap() -> list[str]:
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError("not installed")
    words = ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    words += ["--size", str(isolate.FILE_BYTES), "--perms", "1777", "--tmpfs", isolate.TEMPORARY]
    words += [f"--unshare-{kind}" for kind in ("pid", "net", "ipc", "uts", "cgroup-try")]
    if os.geteuid() == 0 and _may_mount():  # the driver gives them up with its user id
        words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    paths = [*isolate.SYSTEM_FOLDERS, *_shown_folders(), *isolate.SYSTEM_FILES, *isolate.DEVICES]
    # It makes missing parents for their owner only, which is another user if root starts it.
    parents = {str(parent) for path in paths for parent in Path(path).parents} - {"/"}
    for folder in sorted(parents - set(isolate.SYSTEM_FOLDERS)):
        words += ["--dir", folder]
    for path in paths:
        if os.path.islink(path) and path in isolate.SYSTEM_FOLDERS:
            words += ["--symlink", os.readlink(path), path]
        else:
            words += ["--dev-bind-try" if path in isolate.DEVICES else "--ro-bind-try", path, path]
    return [program, *words, "--remount-ro", "/", "--chdir", "/", "--"]


@functools.cache
def _library_paths() -> list[str]:
    """Returns the folders of installed packages, importable by the candidate."""
    paths = [sysconfig.get_path(kind) for kind in ("purelib", "platlib")]
    return [os.path.realpath(path) for path in dict.fromkeys(paths) if os.path.isdir(path)]


@functools.cache
def _shown_folders() -> list[str]:
    """Returns folders outside the system's own with the interpreter, its packages or our code."""
    wanted = [sys.base_prefix, sys.base_exec_prefix, *_library_paths(), CHILD_FOLDER]
    shown: list[str] = []
    for folder in sorted({os.path.realpath(folder) for folder in wanted} - {"/"}):
        # Parents sort before their children, which are then already visible.
        if not any(folder.startswith(f"{top}/") for top in (*isolate.SYSTEM_FOLDERS, *shown)):
            shown.append(folder)
    return [folder for folder in shown if folder not in isolate.SYSTEM_FOLDERS]


def run_python_check(
    code: str,
    check: str,
    entry_point: str,
    *,
    limits: SandboxLimits | None = None,
    allow_code_execution: bool,
    preamble: str = "",
) -> Verdict:
    """Grades Python code, an untrusted module that defines ``entry_point``, by running tests.

    ``check`` is trusted: top-level assertions that call ``entry_point`` (``score`` is the share
    that passed), or a function ``check(candidate)`` that does. ``preamble`` is trusted, too: what
    the tests use, which runs before them, and which the candidate cannot replace.
    """
    require_permission(allow_code_execution)
    # Without a test every answer would be right.
    if not check.strip():
        raise ValueError("check: expected at least one test, got none")
    for name, source in (("check", check), ("preamble", preamble)):
        # Otherwise the candidate would pay for the error.
        try:
            compile(source, f"<{name}>", "exec", dont_inherit=True)
        except SyntaxError as error:
            raise ValueError(f"{name}: expected Python, got {error.msg} ({error.text})") from None
    job = _check_job(code, check, entry_point, preamble)
    head = run_job(job, limits or SandboxLimits())
    score = head["passed"] / head["total"] if head.get("total") else None
    return Verdict(status=head["status"], answer=code, detail=head["detail"], score=score)


def run_python_program(
    code: str,
    stdin: str,
    *,
    output_bytes: int = 1 << 20,
    limits: SandboxLimits | None = None,
    allow_code_execution: bool,
) -> Verdict:
    """Runs untrusted code as ``__main__``; if it ends without error, its output is the answer."""
    require_permission(allow_code_execution)
    job = {"mode": "program", "code": code, "stdin": stdin, "output_bytes": output_bytes}
    head = run_job(job, limits or SandboxLimits())
    return Verdict(status=head["status"], answer=head.get("stdout", ""), detail=head["detail"])


def require_permission(allow_code_execution: bool, *, of: str = "allow_code_execution") -> None:
    """Refuses to go on unless running code was explicitly allowed."""
    # Not merely false: "false" of a configuration is a text, and true.
    if allow_code_execution is not True:
        raise ValueError(
            f"{of}: grading runs model-written code; set allow_code_execution: true in the task to "
            "allow it"
        )
