"""What the sandbox lets through and what it does not. Most tests start real processes (~0.1 s)."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from lit_dlm.grading import SandboxError, SandboxLimits, cgroups, sandbox
from lit_dlm.grading.code import grade_by_outputs
from lit_dlm.grading.plus import PlusGrader
from lit_dlm.grading.sandbox import run_python_check, run_python_program
from tests.grading.hostile import CHECK_FUNCTION, PROBLEM, programs
from tests.processes import no_sandbox_left

# Graded code runs in processes of its own.
pytestmark = pytest.mark.slow

SQUARE_TESTS = "assert f(2) == 4\nassert f(3) == 9\nassert f(-1) == 1"


@pytest.fixture(params=["bubblewrap", "namespaces", "landlock"])
def level(request, monkeypatch):
    """Every level that this machine has."""
    try:
        sandbox.probe(request.param)
    except SandboxError as error:
        pytest.skip(f"{request.param}: {error}")
    monkeypatch.setattr(sandbox, "isolation_method", lambda: request.param)
    return request.param


def _check(code, check=SQUARE_TESTS, limits=None, **kwargs):
    return run_python_check(code, check, "f", limits=limits, allow_code_execution=True, **kwargs)


@pytest.mark.parametrize("check", [SQUARE_TESTS, CHECK_FUNCTION])
def test_right_code_is_right_and_leaves_no_process_and_no_file(level, tmp_path, monkeypatch, check):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "def f(x):\n    return x * x"
    with no_sandbox_left():
        verdict = _check(code, check)
    assert (verdict.status, verdict.detail, verdict.answer) == ("right", "", code)
    assert list(tmp_path.iterdir()) == []


def test_wrong_code_names_the_failing_assertion_and_the_share_that_passed():
    """``abs(x) * 2`` is right for 2 (4) only: 1 of 3 assertions."""
    verdict = _check("def f(x):\n    return abs(x) * 2")
    assert (verdict.status, verdict.detail) == ("wrong", "assert f(3) == 9")
    assert verdict.score == pytest.approx(1 / 3)
    verdict = _check("def f(x):\n    return 4", CHECK_FUNCTION)
    assert (verdict.detail, verdict.score) == (CHECK_FUNCTION.splitlines()[-1].strip(), None)


@pytest.mark.parametrize(
    ("code", "status", "detail"),
    [
        ("def f(x):\n    while True: pass", "timeout", "no answer within the time limit"),
        ("def f(x):\n    raise SystemExit", "runtime_error", "SystemExit: "),
        ("def f(x): return bytearray(4 << 30)", "runtime_error", "MemoryError: "),
        ("import os; os._exit(3)", "runtime_error", "the process ended early with exit code 3"),
        ("def g(x): pass", "runtime_error", "no function 'f' is defined"),
        ("def f(x) return x", "syntax_error", "SyntaxError: expected ':' (line 1)"),
        (
            "x = '\ud800'",
            "syntax_error",
            "SyntaxError: UnicodeEncodeError: 'utf-8' codec can't encode character '\\ud800' in "
            "position 5: surrogates not allowed",
        ),
        ("def f(x): raise KeyError('\\ud800')", "runtime_error", "KeyError: '\\ud800'"),
        ("def f(x): raise ValueError('\\ud800')", "runtime_error", "ValueError: ?"),
    ],
)  # fmt: skip
def test_verdicts_tell_what_went_wrong(code, status, detail):
    verdict = _check(code, limits=SandboxLimits(wall_seconds=1.0 if status == "timeout" else 60.0))
    assert (verdict.status, verdict.detail) == (status, detail)


UNCHANGED = "assert f({0}) == {0} and type(f({0})) is type({0})"
SORTED, HALVED = "assert f(data) == sorted(data)", "assert half(f(8)) == 4"
SAME = "def f(x):\n    return x"
VALUES = (
    *("None", "True", "10**400", "-0.5", "'ü\\ud800'", "b'\\x00'", "(1, [2, {3}])", "range(3)"),
    *("{(1, 2): {'a': None}}", "frozenset({1})", "1+2j", "[]", "int"),
)
# MBPP tests build trees of a class the solution defines and pass them back.
NODES = """
class Node:
    def __init__(self, v): self.v, self.left = v, None
def f(node): return 1 + f(node.left) if node else 0
"""
TREE = "root = Node(1)\nroot.left = Node(2)\nroot.left.left = Node(3)\nassert f(root) == 3"
# A worker that was taken over.
CLAIMS = (
    "import sandbox_child.worker as w\ndef f(xs): pass\n"
    "w._Worker._answer = lambda *_: ['t', ['l'], ['d', 0, ['l']]]"
)
RETYPES = CLAIMS.replace("['t', ['l']", "['t', None").replace("0, ['l']", "0, ['s']")
NESTED = "WireError: the value is nested too deeply or contains itself"
RAISES = """
def check(candidate):
    try:
        candidate(-1)
    except ValueError as error:
        assert str(error) == 'negative'
    else:
        assert False
"""


@pytest.mark.parametrize(
    ("code", "check", "told"),
    [
        (SAME, "\n".join(map(UNCHANGED.format, VALUES)), ""),
        (NODES, f"{TREE}\nassert root.left.v == 2", ""),
        ("def f(x): raise ValueError('negative')", RAISES, ""),
        ("def f(x): raise KeyError('negative')", RAISES, "KeyError: 'negative'"),
        # In one process, ``all`` would take it for the end of ``map`` and be content.
        ("def f(x): raise StopIteration", "assert all(map(f, [2, 3]))", "StopIteration: "),
        # Emptying the argument does not make the test's own copy easier, nor does a reply that
        # says so: what returns a value changes nothing.
        ("def f(xs): return xs.clear() or []", f"data = [3, 1]\n{SORTED}", SORTED),
        (CLAIMS, f"data = [3, 1]\n{SORTED}", SORTED),
        ("def f(xs): return xs.pop()", "data = [3, 1]\nassert f(data) == f(data) == 1", ""),
        # One that returns nothing may change what it was given, to a value of the same type.
        (RETYPES, "data = [3, 1]\nf(data)\nassert data", "the worker's reply is malformed"),
        ("def f(xs): xs.append(xs)", "f([])", NESTED),
        # The tests judge with ``half`` of the preamble, not with the candidate's version of it.
        (SAME, HALVED, ""),
        ("def half(x): return 4\ndef f(x): return 0", HALVED, HALVED),
        ("import numpy\ndef f(x): return numpy.int64(x) * x", SQUARE_TESTS, ""),
    ],
)
def test_tests_use_what_the_candidate_makes_and_nothing_else_of_it(code, check, told):
    limits = SandboxLimits(wall_seconds=60, cpu_seconds=60)
    verdict = _check(code, check, limits, preamble="def half(x):\n    return x / 2\n")
    wanted = "right" if not told else "wrong" if told.startswith("assert") else "runtime_error"
    assert (verdict.status, verdict.detail) == (wanted, told)


@pytest.mark.parametrize("allowed", [False, None, 1, "true"])
def test_execution_must_be_allowed(allowed):
    grader = PlusGrader(allow_code_execution=allowed)
    for run in (
        lambda: run_python_check("", "assert f(1)", "f", allow_code_execution=allowed),
        lambda: grade_by_outputs("1", ["1"], ["3"], allow_code_execution=allowed),
        lambda: grader.grade("def f(x): pass", PROBLEM),
    ):
        with pytest.raises(ValueError, match="allow_code_execution"):
            run()


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        (lambda: _check("def f(x): pass", "assert f("), "check: expected Python"),
        (lambda: _check("def f(x): pass", " \n"), "check: expected at least one test"),
        (lambda: SandboxLimits(wall_seconds=0), "wall_seconds"),
        (lambda: SandboxLimits(memory_bytes=1000), "memory_bytes"),
    ],
)
def test_bad_tests_and_limits_are_errors_of_the_caller(fails, message):
    with pytest.raises(ValueError, match=message):
        fails()


def test_code_runs_in_a_small_world(level):
    code = (
        "import asyncio, os, sys, threading\n"
        "def f(x):\n    return [os.environ.get('HOME'), os.getcwd(), os.getuid() != 0]\n"
        "def squares(numbers):\n    found = []\n"
        "    for n in numbers:\n"
        "        thread = threading.Thread(target=lambda: found.append(n * n))\n"
        "        thread.start()\n        thread.join()\n"
        "    return found\n"
        "async def wait(x):\n    await asyncio.sleep(0)\n    return x * x\n"
        "def loop(x):\n    return asyncio.run(wait(x))\n"
        "def exists(path):\n    return os.path.exists(path)\n"
        "def pid():\n    return os.getpid()\n"
        "def names():\n    return sorted(os.listdir('/dev'))"
    )
    check = "assert f(0) == [None, '/', True]\nassert squares([2, 3]) == [4, 9] and loop(3) == 9"
    if level != "landlock":  # files can be seen there, but not opened
        check += (
            f"\nassert not exists({str(Path(__file__))!r})\nassert not exists('/proc/1')\n"
            "assert not exists('/home')\nassert pid() < 9\n"
            "assert names() == ['full', 'null', 'random', 'urandom', 'zero']"
        )
    verdict = _check(code, check)
    assert verdict.status == "right", verdict.detail


def test_the_interpreter_may_lie_in_the_temporary_folder(tmp_path):
    """A copy of its programs and library, seen as ``/tmp/...`` inside as well."""
    base = tmp_path / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    skipped = ("site-packages", "test", "tests", "idlelib", "__pycache__", "config-*", "ensurepip")
    ignore = shutil.ignore_patterns(*skipped)
    library = shutil.copytree(sysconfig.get_path("stdlib"), base / "lib" / version, ignore=ignore)
    (library / "site-packages").mkdir()
    (base / "bin").mkdir()
    shutil.copy(os.path.realpath(sys.executable), base / "bin" / version)
    shared = Path(sysconfig.get_config_var("LIBDIR"), str(sysconfig.get_config_var("LDLIBRARY")))
    if sysconfig.get_config_var("Py_ENABLE_SHARED"):
        shutil.copy(shared, base / "lib")
    script = (
        "import sys\nfrom lit_dlm.grading import sandbox\n"
        "for method in ('bubblewrap', 'namespaces'):\n"
        "    try: sandbox.probe(method); print(method, 'works')\n"
        "    except sandbox.SandboxError as error: print(method, error)\n"
    )
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": os.environ["PATH"]}
    environment["LD_LIBRARY_PATH"] = str(base / "lib")
    command = [base / "bin" / version, "-c", script]
    told = subprocess.check_output(command, env=environment, text=True)
    assert tmp_path.is_relative_to(tempfile.gettempdir())
    for method in ("bubblewrap", "namespaces"):
        with contextlib.suppress(SandboxError):
            sandbox.probe(method)
            assert f"{method} works" in told


def test_no_sandbox_is_an_error_that_tells_why(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    sandbox.isolation_method.cache_clear()
    message = r"bubblewrap: not installed; namespaces: No such.*nowhere"
    with pytest.raises(SandboxError, match=message):
        _check("def f(x): pass")
    sandbox.isolation_method.cache_clear()


@pytest.mark.parametrize(
    ("times", "told"),
    [(1, ("right", "")), (2, ("runtime_error", "the sandbox was killed twice"))],
)
def test_a_sample_whose_sandbox_was_killed_is_graded_once_more(level, times, told):
    """The candidate's process is killed from outside, as by a system without memory."""
    code = "import time\ndef f(x):\n    time.sleep(1.2)\n    return x * x"
    with ThreadPoolExecutor(1) as pool:
        graded = pool.submit(_check, code, "assert f(2) == 4")
        seen = set()
        for _ in range(times):
            seen |= (started := _sandbox_of(os.getpid(), level, besides=seen))
            time.sleep(0.2)
            os.kill(max(started), signal.SIGKILL)
        verdict = graded.result()
    assert (verdict.status, verdict.detail) == told


def _sandbox_of(parent, level, besides=frozenset()):
    """The processes of one sandbox, the last of them the candidate's, once they are there."""
    deadline = time.monotonic() + 60
    while len(found := _processes_of(parent) - besides) < {"landlock": 2}.get(level, 4):
        assert time.monotonic() < deadline, "no sandbox was started"
        time.sleep(0.005)
    return found


def _processes_of(parent):
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if f'"parent": {parent},'.encode() in path.read_bytes():
                found.add(int(path.parent.name))
    return found


def test_what_no_limit_of_a_process_counts_the_cgroup_of_the_sample_does(level, monkeypatch):
    """Here it has half of what the candidate may map, and is gone in the end."""
    if (parent := cgroups.parent_folder()) is None:
        pytest.skip("no memory cgroup can be made here")
    monkeypatch.setattr(sandbox, "_BESIDE_BYTES", -(1 << 27))
    hoards = "def f(x):\n    return len(bytearray(200 << 20)) * 0 + x * x"
    verdict = _check(hoards, limits=SandboxLimits(memory_bytes=1 << 28))
    assert (verdict.status, verdict.detail) == ("runtime_error", "the sandbox was killed twice")
    assert _check(hoards, limits=SandboxLimits(memory_bytes=1 << 29)).status == "right"
    assert not [*parent.glob(f"lit_dlm_{os.getpid()}_*")]


def test_nothing_runs_on_when_the_run_is_killed(level, tmp_path):
    """SIGKILL while a candidate sleeps for 100 s of its 200: all of it ends with the run."""
    script = (
        "import os\nfrom lit_dlm.grading import SandboxLimits, sandbox, run_python_check\n"
        f"sandbox.isolation_method = lambda: {level!r}\n"
        "run_python_check('import time\\ndef f(x):\\n    time.sleep(100)', 'assert f(1)', 'f',\n"
        "    limits=SandboxLimits(wall_seconds=200), allow_code_execution=True)\n"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", script], env=environment) as run:
        _sandbox_of(run.pid, level)
        run.kill()
    deadline = time.monotonic() + 60
    while (left := _processes_of(run.pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left
    assert list(tmp_path.iterdir()) == []


PATIENT = SandboxLimits(wall_seconds=60.0, cpu_seconds=60.0)


def test_honest_programs_are_right(level):
    """Written in all usual ways, they add up 1, 2 and 3; Landlock lets write to no folder."""
    honest = programs("../honest.txt")
    run = partial(run_python_program, stdin="3\n1 2 3\n", limits=PATIENT, allow_code_execution=True)
    with ThreadPoolExecutor(2) as pool:
        verdicts = dict(zip(honest, pool.map(run, honest.values()), strict=True))
    words = {"many words of output": [str(number) for number in range(100_000)]}
    failed = {
        name: verdict.detail
        for name, verdict in verdicts.items()
        if (verdict.status, str(verdict.answer).split()) != ("right", words.get(name, ["6"]))
    }
    assert [*failed] == (["a temporary file"] if level == "landlock" else []), failed


def test_honest_functions_are_right() -> None:
    """They change arguments in place, and take and return values of the standard library."""

    def grade(text: str) -> str:
        code, check = text.split("\n---\n")
        return _check(code, check, PATIENT).detail

    honest = programs("../honest_functions.txt")
    with ThreadPoolExecutor(2) as pool:
        told = dict(zip(honest, pool.map(grade, honest.values()), strict=True))
    assert not {name: detail for name, detail in told.items() if detail}


@pytest.mark.parametrize(
    ("code", "status", "detail"),
    [
        ("print(1)", "right", ""),
        ("print(1)\n1 / 0", "runtime_error", "ZeroDivisionError: division by zero"),
        ("print(1", "syntax_error", "SyntaxError: '(' was never closed (line 1)"),
        ("raise SystemExit('no solution')", "runtime_error", "no solution"),
        ("import os; os._exit(3)", "runtime_error", "exit code 3"),
        ("import ctypes; ctypes.string_at(0)", "runtime_error", "the process was ended by SIGSEGV"),
        ("print('a' * (1 << 20))", "runtime_error", "1048577 bytes of output are over 1048576"),
        ("print('a' * (1 << 25))", "runtime_error", "OSError: [Errno 27] File too large"),
        ("import os; os.closerange(0, 99)\nwhile True: pass", "timeout", "no end within the time"),
    ],
)
def test_programs_tell_what_went_wrong(code, status, detail):
    limits = SandboxLimits(wall_seconds=1.0) if status == "timeout" else PATIENT
    verdict = run_python_program(code, "", limits=limits, allow_code_execution=True)
    assert verdict.status == status
    assert verdict.detail.startswith(detail)
    assert verdict.answer == ("1\n" if status == "right" else "")
