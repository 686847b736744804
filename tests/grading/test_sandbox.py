"""What the sandbox lets through and what it does not. Most tests start real processes (~0.1 s)."""

from __future__ import annotations

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
from pathlib import Path

import pytest

from lit_dlm.grading import SandboxError, SandboxLimits, sandbox
from lit_dlm.grading.code import grade_by_outputs
from lit_dlm.grading.plus import PlusGrader, PlusProblem
from lit_dlm.grading.sandbox import run_python_check, run_python_program
from tests.processes import no_sandbox_left

# Graded code runs in processes of its own.
pytestmark = pytest.mark.slow

SQUARE_TESTS = "assert f(2) == 4\nassert f(3) == 9\nassert f(-1) == 1"
CHECK_FUNCTION = """
def check(candidate):
    expected = {2: 4, 3: 9}
    for argument, value in expected.items():
        assert candidate(argument) == value, "wrong square"
"""


@pytest.fixture(params=["bubblewrap", "namespaces", "landlock"])
def level(request, monkeypatch):
    """Every level that this machine has."""
    try:
        sandbox.probe(request.param)
    except SandboxError as error:
        pytest.skip(f"{request.param}: {error}")
    monkeypatch.setattr(sandbox, "isolation_method", lambda: request.param)
    return request.param


@pytest.fixture
def nothing_left(tmp_path, monkeypatch):
    """Fails if a process or a scratch file of a sandbox outlives the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with no_sandbox_left():
        yield
    assert list(tmp_path.iterdir()) == []


def _check(code, check=SQUARE_TESTS, limits=None, **kwargs):
    return run_python_check(code, check, "f", limits=limits, allow_code_execution=True, **kwargs)


@pytest.mark.parametrize("check", [SQUARE_TESTS, CHECK_FUNCTION])
def test_right_code_is_right(level, nothing_left, check):
    verdict = _check("def f(x):\n    return x * x", check)
    assert (verdict.status, verdict.detail) == ("right", "")
    assert verdict.answer == "def f(x):\n    return x * x"


def test_wrong_code_names_the_failing_assertion_and_the_share_that_passed():
    """``abs(x) * 2`` is right for 2 (4) only: 1 of 3 assertions."""
    verdict = _check("def f(x):\n    return abs(x) * 2")
    assert (verdict.status, verdict.detail) == ("wrong", "assert f(3) == 9")
    assert verdict.score == pytest.approx(1 / 3)
    verdict = _check("def f(x):\n    return 4", CHECK_FUNCTION)
    assert verdict.detail == 'assert candidate(argument) == value, "wrong square"'
    assert verdict.score is None


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


def test_helpers_of_the_preamble_cannot_be_replaced():
    """The tests judge with ``half`` from the prompt, not with the candidate's version of it."""
    preamble = "def half(x):\n    return x / 2\n"
    check = "assert half(f(8)) == 4"
    assert _check("def f(x):\n    return x", check, preamble=preamble).is_correct
    forged = "def half(x):\n    return 4\ndef f(x):\n    return 0"
    assert not _check(forged, check, preamble=preamble).is_correct


def test_values_of_many_types_go_both_ways():
    code = "def f(x):\n    return x"
    check = "\n".join(
        f"assert f({value}) == {value} and type(f({value})) is type({value})"
        for value in (
            "None", "True", "10**400", "-0.5", "'ü\\ud800'", "b'\\x00'", "(1, [2, {3}])",
            "{(1, 2): {'a': None}}", "frozenset({1})", "1+2j", "range(3)", "[]", "int",
        )
    )  # fmt: skip
    assert _check(code, check).status == "right"


def test_results_that_are_objects_stay_outside_and_can_be_used():
    """MBPP tests build trees of a class the solution defines and pass them back."""
    code = (
        "class Node:\n    def __init__(self, v): self.v, self.left = v, None\n"
        "def f(node):\n    return 1 + f(node.left) if node else 0"
    )
    check = "root = Node(1)\nroot.left = Node(2)\nroot.left.left = Node(3)\nassert f(root) == 3"
    assert _check(code, check + "\nassert root.left.v == 2").status == "right"


def test_exceptions_the_tests_expect_arrive_as_builtin_classes():
    check = (
        "def check(candidate):\n    try:\n        candidate(-1)\n    except ValueError as error:\n"
        "        assert str(error) == 'negative'\n    else:\n        assert False"
    )
    assert _check("def f(x):\n    raise ValueError('negative')", check).is_correct
    assert not _check("def f(x):\n    raise KeyError('negative')", check).is_correct


def test_an_end_of_iteration_ends_no_loop_of_the_tests():
    """In one process, ``all`` would take it for the end of ``map`` and be content."""
    verdict = _check("def f(x):\n    raise StopIteration", "assert all(map(f, [2, 3]))")
    assert (verdict.status, verdict.detail) == ("runtime_error", "StopIteration: ")


def test_event_loops_run(level):
    code = (
        "import asyncio\nasync def wait(x):\n    await asyncio.sleep(0)\n    return x * x\n"
        "def f(x):\n    return asyncio.run(wait(x))"
    )
    assert _check(code).status == "right"


def test_arguments_are_not_shared_with_the_candidate():
    """Emptying the argument does not make the test's own copy easier."""
    code = "def f(xs):\n    xs.clear()\n    return []"
    check = "data = [3, 1, 2]\nassert f(data) == sorted(data)"
    assert _check(code, check).status == "wrong"


def test_code_runs_in_a_small_world(level):
    code = (
        "import os, sys, threading\n"
        "def f(x):\n    return [os.environ.get('HOME'), os.getcwd(), sys.argv[-1], os.getuid()]\n"
        "def squares(numbers):\n    found = []\n"
        "    for n in numbers:\n"
        "        thread = threading.Thread(target=lambda: found.append(n * n))\n"
        "        thread.start()\n        thread.join()\n"
        "    return found\n"
        "def exists(path):\n    return os.path.exists(path)\n"
        "def pid():\n    return os.getpid()\n"
        "def names():\n    return sorted(os.listdir('/dev'))"
    )
    check = "assert f(0)[:2] == [None, '/']\nassert f(0)[3] != 0\nassert squares([2, 3]) == [4, 9]"
    if level != "landlock":  # files can be seen there, but not opened
        check += (
            f"\nassert not exists({str(Path(__file__))!r})\nassert not exists('/proc/1')\n"
            "assert not exists('/home')\nassert pid() < 9\n"
            "assert names() == ['full', 'null', 'random', 'urandom', 'zero']"
        )
    assert _check(code, check).status == "right"


def test_the_interpreter_may_lie_in_the_temporary_folder(tmp_path):
    """A copy of its programs and library, seen as ``/tmp/...`` inside as well."""
    base = tmp_path / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = base / "lib" / version
    skipped = shutil.ignore_patterns(
        "site-packages", "test", "tests", "idlelib", "__pycache__", "config-*", "ensurepip"
    )
    shutil.copytree(sysconfig.get_path("stdlib"), library, ignore=skipped)
    (library / "site-packages").mkdir()
    (base / "bin").mkdir()
    shutil.copy(os.path.realpath(sys.executable), base / "bin" / version)
    shared = sysconfig.get_config_var("LDLIBRARY")
    if shared and sysconfig.get_config_var("Py_ENABLE_SHARED"):
        shutil.copy(os.path.join(sysconfig.get_config_var("LIBDIR"), shared), base / "lib")
    script = (
        "import sys\nfrom lit_dlm.grading import sandbox\n"
        "for method in ('bubblewrap', 'namespaces'):\n"
        "    try: sandbox.probe(method); print(method, 'works')\n"
        "    except sandbox.SandboxError as error: print(method, error)\n"
    )
    told = subprocess.run(
        [base / "bin" / version, "-c", script],
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "LD_LIBRARY_PATH": str(base / "lib"),
             "PATH": os.environ["PATH"]},
        capture_output=True, text=True,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    assert tmp_path.is_relative_to(tempfile.gettempdir())
    for method in ("bubblewrap", "namespaces"):
        try:
            sandbox.probe(method)
        except SandboxError:
            continue
        assert f"{method} works" in told.stdout


def test_no_sandbox_is_an_error_that_tells_why(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    sandbox.isolation_method.cache_clear()
    with pytest.raises(
        SandboxError, match=r"bubblewrap: not installed; namespaces: No such.*nowhere"
    ):
        _check("def f(x): pass")
    sandbox.isolation_method.cache_clear()


def test_installed_packages_can_be_imported():
    code = "import numpy\ndef f(x):\n    return numpy.int64(x) * x"
    limits = SandboxLimits(wall_seconds=60, cpu_seconds=60)
    assert _check(code, limits=limits).status == "right"


@pytest.mark.parametrize("allowed", [False, None, 1, "true"])
def test_execution_must_be_allowed(allowed):
    problem = PlusProblem(
        name="t", entry_point="f", reference_code="", base_inputs=[[1]], plus_inputs=[]
    )
    for run in (
        lambda: run_python_check("", "assert f(1)", "f", allow_code_execution=allowed),
        lambda: grade_by_outputs("```\n1\n```", ["1"], ["3"], allow_code_execution=allowed),
        lambda: PlusGrader(allow_code_execution=allowed).grade("def f(x): pass", problem),
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


def test_programs_read_input_and_print():
    code = "import sys\nprint(sum(map(int, sys.stdin.read().split())))\nsys.exit(0)"
    found = [
        run_python_program(program, given, allow_code_execution=True)
        for program, given in (
            (code, "1 2\n3"),
            ("print(input())\nraise SystemExit(3)", "x"),
            ("while True: print('x' * 1000)", ""),
        )
    ]
    assert [one.status for one in found] == ["right", "runtime_error", "runtime_error"]
    assert [one.answer for one in found] == ["6\n", "", ""]
    assert found[2].detail == "OSError: too much output"


@pytest.mark.parametrize("times", [1, 2])
def test_a_sample_whose_sandbox_was_killed_is_graded_once_more(level, times):
    """The candidate's process is killed from outside, as by a system without memory."""
    code = "import time\ndef f(x):\n    time.sleep(1.2)\n    return x * x"
    with ThreadPoolExecutor(1) as pool:
        graded = pool.submit(
            run_python_check, code, "assert f(2) == 4", "f", allow_code_execution=True
        )
        worker = None
        for _ in range(times):
            worker = _last_descendant(deepest={"landlock": 2}.get(level, 4), besides=worker)
            time.sleep(0.2)
            os.kill(worker, signal.SIGKILL)
        verdict = graded.result()
    if times == 1:
        assert verdict.status == "right"
    else:
        assert (verdict.status, verdict.detail) == (
            "runtime_error",
            "the sandbox was killed twice",
        )


def _last_descendant(deepest, besides):
    """A process that many generations below this one, once there is one."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        generation = [os.getpid()]
        for _ in range(deepest):
            generation = [
                child for one in generation for child in _children(one) if child != besides
            ]
        if generation:
            return generation[0]
        time.sleep(0.005)
    raise AssertionError("no sandbox was started")


def _children(process):
    try:
        tasks = list(Path(f"/proc/{process}/task").glob("*/children"))
        return [int(word) for path in tasks for word in path.read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


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
    run = subprocess.Popen([sys.executable, "-c", script], env=environment)
    ours = f'"parent": {run.pid},'.encode()
    num_levels = {"bubblewrap": 4, "namespaces": 4, "landlock": 2}[level]
    deadline = time.monotonic() + 120
    while len(_processes_with(ours)) < num_levels and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(_processes_with(ours)) == num_levels
    run.kill()
    run.wait()
    deadline = time.monotonic() + 60
    while _processes_with(ours) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _processes_with(ours)
    assert list(tmp_path.iterdir()) == []


def _processes_with(words):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += [path.parent.name] * (words in path.read_bytes())
    return found
