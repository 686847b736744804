"""Programs that attack their grader; run as a script, it grades them all at every level.

``python -m tests.grading.hostile`` prints the table of SECURITY.md, ``... hostile landlock`` all
verdicts of one level, for the user that it is run by.

They aim only at what the script makes: a process that sleeps, a file in a temporary folder, and the
sandbox's own processes. Whatever an attack wins, it shows by answering right.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lit_dlm.grading import SandboxLimits, Verdict, sandbox
from lit_dlm.grading.answers import MATH_SECONDS, grade_math, grade_numeric
from lit_dlm.grading.code import grade_by_outputs, grade_by_tests
from lit_dlm.grading.plus import PlusGrader, PlusProblem
from lit_dlm.grading.sandbox import run_python_check
from tests.processes import no_sandbox_left

CHECK = "assert f(2) == 4\nassert f(3) == 9"
CHECK_FUNCTION = """
NONCE = "the tests' own secret"
def check(candidate):
    expected = {2: 4, 3: 9}
    for argument, value in expected.items():
        assert candidate(argument) == value, "wrong square"
"""


def _programs(name: str) -> dict[str, str]:
    text = Path(__file__).with_name("attacks").joinpath(name).read_text()
    names_and_codes = re.split(r"^=== (.*)\n", text, flags=re.MULTILINE)[1:]
    codes = (code.removesuffix("\n") for code in names_and_codes[1::2])
    return dict(zip(names_and_codes[::2], codes, strict=True))


LOADED = _programs("loaded.txt")
"""Whole modules."""

_PIPE = (
    "r, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETOWN, PID)\nfcntl.fcntl(r, 10, signal.SIGKILL)\n"
    "fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)\nos.write(w, b'x')"
)
WINS = {
    "a limit for another process": "resource.prlimit(VICTIM, resource.RLIMIT_CPU, (1, 1))",
    "a limit for the driver": "resource.prlimit(os.getppid(), resource.RLIMIT_AS, (1, 1))",
    "no limits for itself": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "a signal": "os.kill(VICTIM, signal.SIGTERM)",
    "a signal to a group": "os.killpg(os.getpgid(VICTIM), signal.SIGTERM)",
    "a signal to the driver": "os.kill(os.getppid(), signal.SIGKILL)",
    "a signal to a thread": "return libc.syscall(234, VICTIM, VICTIM, 15) == 0",
    "a handle of a process": "os.pidfd_open(VICTIM)",
    "a handle of the driver": "os.pidfd_open(os.getppid())",
    "tracing": "return libc.ptrace(16, VICTIM, 0, 0) == 0",
    "tracing the driver": "return libc.ptrace(16, os.getppid(), 0, 0) == 0",
    "reading foreign memory": (
        "mine = ctypes.create_string_buffer(8)\n"
        "here = (ctypes.c_void_p * 2)(ctypes.addressof(mine), 8)\n"
        "there = (ctypes.c_void_p * 2)(0x400000, 8)\n"
        "pids = (VICTIM, os.getppid())\n"
        "got = [libc.process_vm_readv(p, here, 1, there, 1, 0) for p in pids]\n"
        "return ctypes.get_errno() != 1 or max(got) > 0"
    ),
    "files of other processes": (
        "for pid in (VICTIM, os.getppid()):\n"
        "    for what in ('mem', 'environ', 'cmdline', 'maps', 'fd/0', 'fd/1'):\n"
        "        try: return bool(open(f'/proc/{pid}/{what}', 'rb'))\n"
        "        except OSError: pass\nreturn False"
    ),
    "a processor for another process": "os.sched_setaffinity(VICTIM, {0})",
    "a priority for another process": "os.setpriority(os.PRIO_PROCESS, VICTIM, 19)",
    "a policy for another process": (
        "os.sched_setscheduler(VICTIM, os.SCHED_IDLE, os.sched_param(0))"
    ),
    "outliving the driver": "return libc.prctl(1, 0, 0, 0, 0) == 0",
    "becoming root": "os.setuid(0)",
    "being root": "return os.getuid() == 0",
    "namespaces of its own": "return libc.unshare(0x10000000) == 0",
    "a mount": "where = os.path.dirname(FILE).encode()\n"
    "return libc.mount(b'none', where, b'tmpfs', 0, None) == 0",
    "another root": "os.chroot('/usr')",
    "fork by its number": "return libc.syscall(56, 17, 0, 0, 0, 0) >= 0",
    "clone3 by its number": "return libc.syscall(435, bytes(88), 88) >= 0",
    "another program": "os.execv(sys.executable, [sys.executable, '-c', ''])",
    "a program in memory": "fd = os.memfd_create('x')\nreturn os.write(fd, b'#!/bin/sh') > 0",
    "32-bit system calls": (
        "code = mmap.mmap(-1, 4096, prot=7)\n"
        "code.write(bytes.fromhex('b814000000cd80c3'))\n"  # getpid: mov eax, 20; int 0x80; ret
        "where = ctypes.addressof(ctypes.c_char.from_buffer(code))\n"
        "return ctypes.CFUNCTYPE(ctypes.c_int)(where)() > 0"
    ),
    "x32 system calls": "return libc.syscall(0x40000000 + 39) > 0",
    "shared memory": "return libc.shmget(0x11d1, 4096, 0o1666) != -1",
    "a message queue": "return libc.msgget(0x11d1, 0o1666) != -1",
    "shared memory of others": "return libc.shmctl(SHARED, 0, None) == 0",
    "reading the shared memory of others": "return libc.shmat(SHARED, None, 0) != -1",
    "a key": "return libc.syscall(248, b'user', b'k', b'v', 1, -4) != -1",
    "keys of others": "return libc.syscall(250, 0, -4, 1) != -1",
    "a program in the kernel": "return libc.syscall(321, 0, bytes(128), 128) != -1",
    "faults handled by itself": "return libc.syscall(323, 1) != -1",
    "rings of the kernel": "return libc.syscall(425, 8, bytes(256)) != -1",
    "all requests of the kernel": (
        "where = ctypes.c_ulong(0)\nreturn libc.syscall(206, 30_000, ctypes.byref(where)) == 0"
    ),
    "a watch on a folder": (
        "return libc.inotify_add_watch(libc.inotify_init(), b'/', 0xfff) != -1"
    ),
    "messages of the kernel": "return libc.klogctl(3, bytes(4096), 4096) > 0",
    "a signal by a pipe": _PIPE.replace("PID", "VICTIM"),
    "a signal to the driver by a pipe": _PIPE.replace("PID", "os.getppid()"),
    "a signal by a pair of sockets": (
        "one, two = socket.socketpair()\nfcntl.ioctl(one, 0x8901, struct.pack('i', VICTIM))\n"
        "fcntl.ioctl(one, 0x5452, struct.pack('i', 1))\ntwo.send(b'x')"
    ),
    "a datagram from a pair": (
        "one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "one.sendto(b'x', ABSTRACT)"
    ),
    "memory in a file": "os.ftruncate(os.memfd_create('x'), 1 << 40)",
    "a file without a name": "os.open(os.path.dirname(FILE), 0o20200002)",
    "a link to a file": "os.symlink(FILE, FILE + '4'); open(FILE + '4')",
    "what the run was given": (
        "import sys\nfound = [*os.environ.values(), *sys.argv, *sys.orig_argv]\n"
        "return any('SECRET' in text for text in found)"
    ),
    "descriptors of others": (
        "import stat\nkinds = []\nfor fd in range(256):\n"
        "    try: kinds.append(stat.filemode(os.fstat(fd).st_mode)[0])\n"
        "    except OSError: pass\nreturn ''.join(kinds) != 'cccpp'"
    ),
    "threads without a limit": "return resource.getrlimit(resource.RLIMIT_NPROC)[0] > 4096",
    "a datagram": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "a local socket": "socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)",
    "reading a file": "return bool(open(FILE).read())",
    "listing a folder": "return bool(os.listdir(os.path.dirname(FILE)))",
    "writing a file": "open(FILE, 'a').write('x')",
    "truncating a file": "os.truncate(FILE, 0)",
    "removing a file": "os.remove(FILE)",
    "renaming a file": "os.rename(FILE, FILE + '2')",
    "linking to a file": "os.link(FILE, FILE + '3')",
    "changing its mode": "os.chmod(FILE, 0o777)",
    "changing its times": "os.utime(FILE, (0, 0))",
    "an attribute of a file": "os.setxattr(FILE, 'user.x', b'y')",
    "new files": (
        "for folder in (os.path.dirname(FILE), '.', '/tmp', '/dev/shm', '/var/tmp'):\n"
        "    path = os.path.join(folder, 'lit_dlm_exploit')\n"
        "    for make in (lambda: open(path, 'w'), lambda: os.mkdir(path),\n"
        "                 lambda: os.symlink('/', path), lambda: os.mkfifo(path)):\n"
        "        try: make()\n        except OSError: continue\n"
        "        return True\nreturn False"
    ),
}
"""What to do, as the body of a function: it wins by its end without an error, or returns it."""

VALUES = {
    "a billion numbers in a range": "range(10**9)",
    "a number of 30 million digits": "1 << 10**8",
    "a huge value": "[0] * 10**8",
    "an endless iterator": "iter(int, 1)",
    "a value that contains itself": "(a := []).append(a) or a",
    "numbers of one hash": "[i * (2**61 - 1) for i in range(100_000)]",
    "a set of one hash": "{i * (2**61 - 1): 0 for i in range(20_000)}.keys()",
    "tuples in tuples": "__import__('functools').reduce(lambda t, _: (t, t), range(18), 0.5)",
    "a long chain": "__import__('functools').reduce(lambda t, _: [t], range(10**5), 0)",
    "a view of views": "{(1, 2): 3}.items()",
    "a text of a billion": "'4' * 10**9",
    "a list that lies": (
        "type('L', (list,), {'__iter__': lambda s: iter([4]), '__len__': lambda s: 1,"
        " '__eq__': lambda s, o: True})([5])"
    ),
    "mappings in mappings": "__import__('functools').reduce(lambda d, _: {0: d}, range(900), {})",
    "a memory view": "memoryview(b'4')",
    "not a number": "float('nan')",
}
"""Returned to tests that compare them in several ways."""
ENDS = {
    "an end of iteration": "raise StopIteration",
    "an end of generation": "raise GeneratorExit",
    "an error of no items": "raise IndexError",
    "an exit": "raise SystemExit",
    "an error of assertions": "raise AssertionError",
}
"""Raised in the middle of tests that iterate."""
ITERATING_CHECK = """
assert all(map(lambda x: f(x) == x * x, [2, 3]))
assert [y for y in zip(map(f, [2, 3]), [4, 9])] or True
assert all(y == z for y, z in zip(map(f, [2, 3]), [4, 9]))
"""
HEAVY_CHECK = "assert set(f(2)) == {4}\nassert sorted(f(3)) == [9]\nassert f(4) * 2 == 32"

_FINALLY = "".join(f"{' ' * i}try:\n{' ' * i} pass\n{' ' * i}finally:\n" for i in range(19))
TEXTS = {
    "nested finally": f"{_FINALLY}{' ' * 19}pass\ndef f(x): return x",
    "nested parentheses": "def f(x): return " + "(" * 100_000,
    "a chain of minus": "def f(x): return " + "-" * 300_000 + "x",
    "a chain of sums": "def f(x): return " + "+".join(["x"] * 300_000),
    "a chain of lambdas": "f = " + "lambda:" * 100_000 + "0",
    "deep indentation": "def f(x):\n" + "".join(f"{' ' * i}if x:\n" for i in range(1, 101)),
    "a literal of a million digits": "def f(x): return " + "7" * 10**6,
    "a tower of powers": "def f(x): return 9**9**9**9",
    "half a character in the code": "def f(x): return '\ud800'",
    "a null byte": "def f(x):\0 return x",
    "nested brackets": "def f(x): return " + "[" * 199 + "]" * 199 + "[" * 10**5,
}
"""Completions, of which not even the code can be found for free."""

ANSWERS = {
    "unclosed boxes": "\\boxed{" * 50_000,
    "numbers without end": "1 " * 50_000,
    "a million digits": "7" * 10**6,
    "commas": "1,111" * 20_000,
    "markers": "####" * 200_000,
    "powers": "\\boxed{" + "^{" * 100_000 + "}",
    "powers of powers": "\\boxed{9^{9^{9^{9^{9}}}}}",
    "nested roots": "\\boxed{" + "\\sqrt{" * 200 + "4" + "}" * 201,
    "a long sum": "\\boxed{" + "+".join(["x"] * 300) + "}",
    "factorials": "\\boxed{((9!)!)!}",
    "an expression of Python": "\\boxed{__import__('os').system('touch /tmp/lit_dlm_exploit')}",
}
"""Answers that are numbers or formulas; the right one is 16."""

PROGRAMS = _programs("programs.txt")
"""Programs that read 2 and should print 4."""


def grade_all(method: sandbox.IsolationMethod) -> dict[str, Any]:
    """Grades all of them at one level.

    Returns:
        Per program status, score, detail and seconds over its limit; ``damage``, what any of them
        changed, and ``grown_mb``, by how much the memory of this process grew at most.
    """
    sandbox.isolation_method = lambda: method
    limits = SandboxLimits(wall_seconds=0.5, cpu_seconds=1.0)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "secret.txt")
        file.write_text("secret")
        victim = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True
        )
        shared, inbox = _share()
        try:
            before = _state(file, victim.pid, shared, inbox)
            jobs = _jobs((file, victim.pid, shared, inbox), limits)
            _timed(lambda: grade_by_tests("def f(x): return 4", CHECK, "f", **ALLOWED), 0.0)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            with no_sandbox_left(), ThreadPoolExecutor(4) as pool:
                results = dict(zip(jobs, pool.map(_run, jobs.values()), strict=True))
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
            alive = victim.poll() is None
            after = _state(file, victim.pid, shared, inbox) if alive else None
            damage = [] if after == before else [f"{before} became {after}"]
        finally:
            inbox.close()
            _libc.shmctl(shared, 0, None)
            victim.kill()
            victim.wait()
    places = ("/tmp", "/dev/shm", "/var/tmp", ".")
    damage += [p for p in places if os.path.lexists(os.path.join(p, "lit_dlm_exploit"))]
    return {"results": results, "damage": damage, "grown_mb": grown / 1024}


ALLOWED: dict[str, Any] = {"allow_code_execution": True}


_libc = ctypes.CDLL(None)


def _share() -> tuple[int, socket.socket]:
    """What others could take away or write to where the kernel's objects are shared."""
    inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    inbox.bind(f"\0lit_dlm_{os.getpid()}")
    inbox.setblocking(False)
    return _libc.shmget(0, 4096, 0o666), inbox


def _jobs(targets: Any, limits: SandboxLimits) -> dict[str, tuple[Any, float]]:
    jobs: dict[str, tuple[Callable[[], Verdict], float]] = {}

    def add(name: str, grade: Callable[[], Verdict], seconds: float = 0.5) -> None:
        assert name not in jobs
        jobs[name] = (grade, seconds)

    def check(name: str, code: str, tests: str) -> None:
        add(name, lambda: run_python_check(code, tests, "f", limits=limits, **ALLOWED))

    for number, (name, code) in enumerate(LOADED.items()):
        check(name, code, (CHECK, CHECK_FUNCTION)[number % 2])
    for name, body in WINS.items():
        check(name, _attack(body, *targets), CHECK)
    for name, body in ENDS.items():
        check(name, f"def f(x):\n    {body}", ITERATING_CHECK)
    grader = PlusGrader(limits=limits, **ALLOWED)
    for number, (name, value) in enumerate(VALUES.items()):
        code = f"def f(x):\n    return {value}"
        check(name, code, HEAVY_CHECK)
        problem = _problem(("same_set", "root", "close")[number % 3])
        add(f"{name} (rule)", lambda c=code, p=problem: grader.grade(c, p))  # type: ignore[misc]
    for name, text in TEXTS.items():
        # Extraction has up to 10 s of its own.
        add(name, lambda t=text: grade_by_tests(t, CHECK, "f", limits=limits, **ALLOWED), 10.5)  # type: ignore[misc]
        check(f"{name} (as code)", text, CHECK)
    for name, text in ANSWERS.items():
        add(name, lambda t=text: grade_numeric(t, "16"), 0.0)  # type: ignore[misc]
    if importlib.util.find_spec("math_verify"):
        # A comparison that is ended costs the next one the start of its process.
        start = _timed(lambda: grade_math("\\boxed{x}", "16"), 0.0)["seconds_over"]
        for name, text in ANSWERS.items():
            formula = lambda t=text: grade_math(t, "16")  # type: ignore[misc] # noqa: E731
            add(f"{name} (formula)", formula, start + MATH_SECONDS)
    for name, code in PROGRAMS.items():
        add(
            name,
            lambda c=code: grade_by_outputs(c, ["2"], ["4"], limits=limits, **ALLOWED),  # type: ignore[misc]
            10.5,
        )
    return jobs


def _problem(rule: Any) -> PlusProblem:
    return PlusProblem(
        name=f"Hostile/{rule}",
        entry_point="f",
        reference_code="def f(x):\n    return [2.0]",
        base_inputs=[[[4, -4, 1]]],
        plus_inputs=[],
        rule=rule,
    )


def _attack(body: str, file: Path, victim: int, shared: int, inbox: socket.socket) -> str:
    if "return" not in body:
        body += "\nreturn True"
    body = body.replace("VICTIM", str(victim)).replace("FILE", repr(str(file)))
    body = body.replace("SHARED", str(shared)).replace("ABSTRACT", repr(inbox.getsockname()))
    body = textwrap.indent(body, "    ")
    return (
        "import ctypes, fcntl, mmap, os, resource, signal, socket, struct, sys\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        f"def attack():\n{body}\n"
        "def f(x):\n    try: won = attack()\n    except Exception: won = False\n"
        "    return x * x if won else 0"
    )


def _state(file: Path, victim: int, shared: int, inbox: socket.socket) -> tuple[Any, ...]:
    status = file.stat()
    told = b""
    with contextlib.suppress(BlockingIOError):
        told = inbox.recv(1)
    limits = [resource.prlimit(victim, kind) for kind in range(resource.RLIMIT_NOFILE + 1)]
    return (
        *(sorted(os.listdir(file.parent)), file.read_text(), status.st_mode, status.st_mtime_ns),
        *(status.st_nlink, os.listxattr(file), limits, os.sched_getaffinity(victim)),
        *(os.getpriority(os.PRIO_PROCESS, victim), os.sched_getscheduler(victim)),
        *(told, _libc.shmctl(shared, 2, ctypes.create_string_buffer(256))),  # IPC_STAT
    )


def _run(job: tuple[Callable[[], Verdict], float]) -> dict[str, Any]:
    return _timed(*job)


def _timed(grade: Callable[[], Verdict], limit: float) -> dict[str, Any]:
    started = time.monotonic()
    verdict = grade()
    return {
        "status": verdict.status,
        "score": verdict.score or 0.0,
        "detail": verdict.detail,
        "seconds_over": time.monotonic() - started - limit,
    }


def attack_unguarded() -> list[str]:
    """Runs the attacks of ``WINS`` without any wall; returns those that win.

    Each has a parent and a victim of its own. Only in a process namespace in which nobody else is.
    """
    assert {path.name for path in Path("/proc").glob("[0-9]*")} == {"1"}
    assert os.getpid() == 1
    winners = []
    for name, body in WINS.items():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "secret.txt")
            file.write_text("secret")
            sleep = [sys.executable, "-c", "import time; time.sleep(3600)"]
            victim = subprocess.Popen(sleep, start_new_session=True)
            shared, inbox = _share()
            code = (
                _attack(body, file, victim.pid, shared, inbox)
                + "\nprint('won' if f(2) == 4 else '')"
            )
            parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {code!r}])"
            command = [sys.executable, "-c", parent]
            try:
                told = subprocess.run(command, stdout=subprocess.PIPE, timeout=5).stdout
            except subprocess.TimeoutExpired:  # the parent stands still
                told = b"won"
            if b"won" in told:
                winners.append(name)
            victim.kill()
            victim.wait()
            inbox.close()
            _libc.shmctl(shared, 0, None)
            subprocess.run(["umount", folder], stderr=subprocess.DEVNULL)
    return winners


SYSTEM_PYTHON = "/usr/bin/python3"
"""One that other users may run, which root's own often is not."""
_NOBODY = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups"]
_POWERLESS = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
SETUPS: dict[str, tuple[Any, list[str]]] = {
    "bubblewrap": ("bubblewrap", [sys.executable]),
    "bubblewrap, plain user": ("bubblewrap", [*_NOBODY, SYSTEM_PYTHON]),
    "namespaces": ("namespaces", [sys.executable]),
    "namespaces, plain user": ("namespaces", [*_NOBODY, SYSTEM_PYTHON]),
    # As in a container that allows user namespaces alone.
    "namespaces, root without CAP_SYS_ADMIN": ("namespaces", [*_POWERLESS, SYSTEM_PYTHON]),
    "landlock, plain user": ("landlock", [*_NOBODY, SYSTEM_PYTHON]),
    "landlock, root": ("landlock", [SYSTEM_PYTHON]),
}
"""Levels and who runs them: the method, and the beginning of a command."""


def run_setup(name: str) -> dict[str, Any] | str:
    """What :func:`grade_all` finds in one of :data:`SETUPS`, or why it is not to be had here."""
    method, words = SETUPS[name]
    if words[0] == "setpriv" and os.geteuid() != 0:
        return "only root can run it for another user"
    if not all(shutil.which(word) for word in (words[0], words[-1])):
        return f"needs {words[0]} and {words[-1]}"
    root = Path(__file__).parents[2]
    told = subprocess.run(
        [*words, "-m", "tests.grading.hostile", method],
        cwd=root,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
        | {"LIT_DLM_TEST": "SECRET"},
        capture_output=True,
        timeout=600,
    )
    if told.returncode == 3:
        return told.stderr.decode()
    assert told.returncode == 0, told.stderr.decode()
    report: dict[str, Any] = json.loads(told.stdout)
    return report


def scored(report: dict[str, Any]) -> dict[str, Any]:
    """The programs that got anything."""
    results = report["results"].items()
    return {name: r for name, r in results if r["status"] == "right" or r["score"]}


def table() -> Iterator[str]:
    """Runs all setups; lines of a table in Markdown."""
    yield "| level | programs | scored | left or changed | memory, MB | over the limit, s |"
    yield "|---|---:|---:|---:|---:|---:|"
    for name in SETUPS:
        report = run_setup(name)
        if isinstance(report, str):
            yield f"| {name} | {report.strip()} | | | | |"
            continue
        results = report["results"]
        cells = [len(results), len(scored(report)), len(report["damage"])]
        late = max(results, key=lambda name: results[name]["seconds_over"])
        cells += [f"+{report['grown_mb']:.0f}", f"{results[late]['seconds_over']:.1f} ({late})"]
        yield f"| {name} | {' | '.join(map(str, cells))} |"


def main(level: Any) -> None:
    """Grades at one level for :func:`run_setup`; exits with 3 where it is not to be had."""
    try:
        sandbox.probe(level)
    except sandbox.SandboxError as error:
        sys.stderr.write(str(error))
        sys.exit(3)
    json.dump(grade_all(level), sys.stdout)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        for line in table():
            sys.stdout.write(f"{line}\n")
    elif sys.argv[1] == "unguarded":
        json.dump(attack_unguarded(), sys.stdout)
    else:
        main(sys.argv[1])
