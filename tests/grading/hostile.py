"""Programs that attack their grader; run as a script, it grades them all at every level.

``python -m tests.grading.hostile`` prints the table of SECURITY.md, ``... hostile landlock`` all
verdicts of one level, for the user that it is run by.

They aim only at what the script makes: a process that sleeps, a file in a temporary folder, and the
sandbox's own processes. Whatever an attack wins, it shows by answering right.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
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
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from lit_dlm.grading import SandboxLimits, Verdict, sandbox
from lit_dlm.grading.answers import MATH_SECONDS, grade_math, grade_numeric
from lit_dlm.grading.child.extraction import whole_part
from lit_dlm.grading.code import extract_code, grade_by_outputs, ungradable
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


def programs(name: str) -> dict[str, str]:
    """Programs of a file, by the names above them."""
    text = Path(__file__).with_name("attacks").joinpath(name).read_text()
    names_and_codes = re.split(r"^=== (.*)\n", text, flags=re.MULTILINE)[1:]
    codes = (code.removesuffix("\n") for code in names_and_codes[1::2])
    return dict(zip(names_and_codes[::2], codes, strict=True))


LOADED = programs("loaded.txt")
"""Whole modules."""

WINS = programs("wins.txt")
"""What to do, as the body of a function: it wins by its end without an error, or returns it."""

VALUES = programs("values.txt")
"""Returned to tests that compare them in several ways."""
ENDS = ("StopIteration", "GeneratorExit", "IndexError", "SystemExit", "AssertionError")
"""Raised in the middle of tests that iterate."""
ITERATING_CHECK = """
assert all(map(lambda x: f(x) == x * x, [2, 3]))
assert [y for y in zip(map(f, [2, 3]), [4, 9])] or True
assert all(y == z for y, z in zip(map(f, [2, 3]), [4, 9]))
"""
CHANGES = programs("changes.txt")
"""Given a list that a call should sort in place."""
CHANGE_CHECK = "data = [3, 1]\nf(data)\nassert data == [1, 3]"
HEAVY_CHECK = "assert set(f(2)) == {4}\nassert sorted(f(3)) == [9]\nassert f(4) * 2 == 32"

WITH_THREADS = """
import threading
def f(x):
    values = []
    threads = [threading.Thread(target=values.append, args=(x,)) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    return sum(values) * x // 8
"""

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

PROBLEM = PlusProblem(
    name="Hostile",
    entry_point="f",
    reference_code="def f(x):\n    return [2.0]",
    base_inputs=[[[4, -4, 1]]],
    plus_inputs=[],
)
PROGRAMS = programs("programs.txt")
"""Programs that read 2 and should print 4."""


def grade_by_tests(
    completion: str,
    check: str,
    entry_point: str,
    *,
    stub: str = "",
    limits: SandboxLimits | None = None,
) -> Verdict:
    """Grades the code in a completion, as tasks do."""
    found = extract_code(completion, entry_point, stub=stub)
    options = {"limits": limits, "preamble": whole_part(stub), **ALLOWED}
    return ungradable(found) or run_python_check(str(found.code), check, entry_point, **options)


def grade_all(method: sandbox.IsolationMethod, *, walls_only: bool) -> dict[str, Any]:
    """Grades all of them at one level, or those that attack its walls.

    Returns:
        Per program status, score, detail and seconds over its limit; ``damage``, what any of them
        changed, ``grown_mb``, by how much the memory of this process grew at most, and
        ``beside``, the verdicts on right code while others take all threads there are.
    """
    sandbox.isolation_method = lambda: method
    with _targets([sys.executable, "-c", "import time; time.sleep(3600)"]) as targets:
        before = _state(targets)
        jobs = _jobs(targets, SandboxLimits(wall_seconds=0.5, cpu_seconds=1.0), walls_only)
        grade_by_tests("def f(x): return 4", CHECK, "f")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with no_sandbox_left(), ThreadPoolExecutor(4) as pool:
            found = pool.map(lambda job: _timed(*job), jobs.values())
            results = dict(zip(jobs, found, strict=True))
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
        beside = _beside()
        after = _state(targets) if targets.victim.poll() is None else None
        damage = [] if after == before else [f"{before} became {after}"]
    places = ("/tmp", "/dev/shm", "/var/tmp", ".")
    damage += [p for p in places if os.path.lexists(os.path.join(p, "lit_dlm_exploit"))]
    return {"results": results, "damage": damage, "grown_mb": grown / 1024, "beside": beside}


ALLOWED: dict[str, Any] = {"allow_code_execution": True}
_libc = ctypes.CDLL(None)


class _Targets(NamedTuple):
    file: Path
    victim: subprocess.Popen[bytes]
    shared: int
    inbox: socket.socket


@contextlib.contextmanager
def _targets(sleep: list[str]) -> Iterator[_Targets]:
    """What others could change, take away or write to where the kernel's objects are shared."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox,
        subprocess.Popen(sleep, start_new_session=True) as victim,
    ):
        shared = _libc.shmget(0, 4096, 0o666)
        try:
            file = Path(folder, "secret.txt")
            file.write_text("secret")
            inbox.bind(f"\0lit_dlm_{os.getpid()}")
            inbox.setblocking(False)
            yield _Targets(file, victim, shared, inbox)
        finally:
            _libc.shmctl(shared, 0, None)
            victim.kill()


def _jobs(targets: _Targets, limits: SandboxLimits, walls_only: bool) -> dict[str, Any]:
    jobs: dict[str, tuple[Callable[[], Verdict], float]] = {}

    def add(name: str, seconds: float, grade: Callable[..., Verdict], *args: Any) -> None:
        assert name not in jobs
        jobs[name] = (lambda: grade(*args), seconds)

    run = functools.partial(run_python_check, entry_point="f", limits=limits, **ALLOWED)
    for number, (name, code) in enumerate(LOADED.items()):
        add(name, 0.5, run, code, (CHECK, CHECK_FUNCTION)[number % 2])
    for name, body in WINS.items():
        add(name, 0.5, run, _attack(body, targets), CHECK)
    for name in ENDS:
        add(name, 0.5, run, f"def f(x):\n    raise {name}", ITERATING_CHECK)
    for name, code in CHANGES.items():
        add(name, 0.5, run, code, CHANGE_CHECK)
    outputs = functools.partial(grade_by_outputs, limits=limits, **ALLOWED)
    for name, code in PROGRAMS.items():
        add(name, 0.5, outputs, code, ["2"], ["4"])
    if walls_only:
        return jobs
    grader = PlusGrader(limits=limits, **ALLOWED)
    for number, (name, value) in enumerate(VALUES.items()):
        code = f"def f(x):\n    return {value}"
        add(name, 0.5, run, code, HEAVY_CHECK)
        problem = replace(PROBLEM, rule=("same_set", "root", "close")[number % 3])
        add(f"{name} (rule)", 0.5, grader.grade, code, problem)
    extract = functools.partial(grade_by_tests, limits=limits)
    for name, text in TEXTS.items():  # extraction has up to 10 s of its own
        add(name, 10.5, extract, text, CHECK, "f")
        add(f"{name} (as code)", 0.5, run, text, CHECK)
    if importlib.util.find_spec("math_verify"):
        # A comparison that is ended costs the next one the start of its process.
        start = _timed(lambda: grade_math("\\boxed{x}", "16"), 0.0)["seconds_over"]
        for name, text in ANSWERS.items():
            add(name, start + MATH_SECONDS, grade_numeric, text, "16")
            add(f"{name} (formula)", start + MATH_SECONDS, grade_math, text, "16")
    return jobs


def _beside() -> list[str]:
    limits = SandboxLimits(wall_seconds=4.0)
    run = functools.partial(
        run_python_check, check=CHECK, entry_point="f", limits=limits, **ALLOWED
    )
    with ThreadPoolExecutor(6) as pool:
        bombs = [pool.submit(run, LOADED["threads of 16 KiB"]) for _ in range(3)]
        time.sleep(1.0)
        verdicts = [*pool.map(run, [WITH_THREADS] * 4)]
    return [v.status for v in verdicts] + [b.result().status for b in bombs if b.result().score]


def _attack(body: str, targets: _Targets) -> str:
    if "return" not in body:
        body += "\nreturn True"
    body = body.replace("VICTIM", str(targets.victim.pid)).replace("FILE", repr(str(targets.file)))
    body = body.replace("SHARED", str(targets.shared))
    body = body.replace("ABSTRACT", repr(targets.inbox.getsockname()))
    return (
        "import ctypes, fcntl, mmap, os, resource, signal, socket, struct, sys\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        f"def attack():\n{textwrap.indent(body, '    ')}\n"
        "def f(x):\n    try: won = attack()\n    except Exception: won = False\n"
        "    return x * x if won else 0"
    )


def _state(targets: _Targets) -> tuple[Any, ...]:
    file, victim = targets.file, targets.victim.pid
    status = file.stat()
    told = b""
    with contextlib.suppress(BlockingIOError):
        told = targets.inbox.recv(1)
    limits = [resource.prlimit(victim, kind) for kind in range(resource.RLIMIT_NOFILE + 1)]
    return (
        *(sorted(os.listdir(file.parent)), file.read_text(), status.st_mode, status.st_mtime_ns),
        *(status.st_nlink, os.listxattr(file), limits, os.sched_getaffinity(victim)),
        *(os.getpriority(os.PRIO_PROCESS, victim), os.sched_getscheduler(victim)),
        *(told, _libc.shmctl(targets.shared, 2, ctypes.create_string_buffer(256))),  # IPC_STAT
    )


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
        with _targets(["sleep", "3600"]) as targets:
            code = f"{_attack(body, targets)}\nprint('won' if f(2) == 4 else '')"
            parent = ["sh", "-c", '"$0" -c "$1"; true', sys.executable, code]
            try:
                told = subprocess.run(parent, stdout=subprocess.PIPE, timeout=3).stdout
            except subprocess.TimeoutExpired:  # the parent stands still
                told = b"won"
            if b"won" in told:
                winners.append(name)
            subprocess.run(["umount", targets.file.parent], stderr=subprocess.DEVNULL)
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


def run_setup(name: str, *, walls_only: bool = False) -> dict[str, Any] | str:
    """What :func:`grade_all` finds in one of :data:`SETUPS`, or why it is not to be had here."""
    method, words = SETUPS[name]
    if words[0] == "setpriv" and os.geteuid() != 0:
        return "only root can run it for another user"
    if not all(shutil.which(word) for word in (words[0], words[-1])):
        return f"needs {words[0]} and {words[-1]}"
    root = Path(__file__).parents[2]
    closed = [folder for folder in (root, *root.parents) if not folder.stat().st_mode & 0o001]
    if closed and os.geteuid() == 0 and words[-1] == SYSTEM_PYTHON:
        return f"other users cannot enter {closed[0]}"
    told = subprocess.run(
        [*words, "-m", "tests.grading.hostile", method, "walls" if walls_only else "all"],
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


def main(level: Any, which: str = "all") -> None:
    """Grades at one level for :func:`run_setup`; exits with 3 where it is not to be had."""
    try:
        sandbox.probe(level)
    except sandbox.SandboxError as error:
        sys.stderr.write(str(error))
        sys.exit(3)
    json.dump(grade_all(level, walls_only=which == "walls"), sys.stdout)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        for line in table():
            sys.stdout.write(f"{line}\n")
    elif sys.argv[1] == "unguarded":
        json.dump(attack_unguarded(), sys.stdout)
    else:
        main(*sys.argv[1:])
