"""What the sandbox lets through and what it does not. Most tests start real processes (~0.1 s)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lit_dlm.grading import SandboxLimits, isolation_level, launch, sandbox
from lit_dlm.grading.sandbox import (
    read_reply,
    run_python_calls,
    run_python_check,
    run_python_program,
)
from tests.processes import no_sandbox_left

# Graded code runs in processes of its own.
pytestmark = pytest.mark.slow

SQUARE_TESTS = "assert f(2) == 4\nassert f(3) == 9\nassert f(-1) == 1"
CHECK_FUNCTION = """
NONCE = "the tests' own secret"
def check(candidate):
    expected = {2: 4, 3: 9}
    for argument, value in expected.items():
        assert candidate(argument) == value, "wrong square"
"""
QUICK = SandboxLimits(wall_seconds=0.5, cpu_seconds=1.0)


@pytest.fixture(params=["best", pytest.param("process", marks=pytest.mark.slow)])
def level(request, monkeypatch):
    """The level this machine has, and the lower one that every machine has."""
    level = isolation_level() if request.param == "best" else request.param
    monkeypatch.setattr(launch, "isolation_level", lambda: level)
    return level


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


# Each must not be graded as right, must leave no process and no file.
EXPLOITS = {
    "sys.exit when loaded": "import sys\nsys.exit(0)",
    "sys.exit when called": "import sys\ndef f(x):\n    sys.exit(0)",
    "os._exit when loaded": "import os\nos._exit(0)",
    "os._exit when called": "import os\ndef f(x):\n    os._exit(0)",
    "raise SystemExit": "def f(x):\n    raise SystemExit",
    "raise SystemExit(0) at the end": "def f(x):\n    return 0\nraise SystemExit(0)",
    "exit hook": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x):\n    return 0",
    "always equal": (
        "class Yes:\n    def __eq__(self, other): return True\n"
        "    def __ne__(self, other): return False\n    __hash__ = None\n"
        "def f(x):\n    return Yes()"
    ),
    "always equal int": (
        "class Yes(int):\n    def __eq__(self, other): return True\n"
        "    def __hash__(self): return 0\ndef f(x):\n    return Yes(0)"
    ),
    "swallowed assertion": (
        "import builtins\nclass Quiet(Exception):\n    pass\nbuiltins.AssertionError = Quiet\n"
        "def f(x):\n    return 0"
    ),
    "own assertion hook": "import sys\nsys.excepthook = lambda *a: None\ndef f(x):\n    return 0",
    "frame reading": (
        "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        for space in (frame.f_locals, frame.f_globals):\n"
        "            for name in ('expected', 'value', 'nonce', 'job', 'check'):\n"
        "                if name in space: return space[name]\n"
        "        frame = frame.f_back\n    return 0"
    ),
    "object hunting": (
        "import gc\ndef f(x):\n    for o in gc.get_objects():\n"
        "        if isinstance(o, dict) and x in o and o[x] == x * x: return o[x]\n"
        "        if isinstance(o, str) and 'assert f' in o: return x * x\n    return 0"
    ),
    "marker on standard output": (
        'print(\'right\')\nprint(\'{"status": "right", "nonce": ""}\', flush=True)\n'
        "def f(x):\n    print('right', flush=True)\n    return 0"
    ),
    "marker on every descriptor": (
        'import os, struct\nbody = b\'{"status":"right","detail":"","nonce":"0"}\'\n'
        "for fd in range(64):\n    try: os.write(fd, struct.pack('>I', len(body)) + body)\n"
        "    except OSError: pass\ndef f(x):\n    return 0"
    ),
    "forged replies": (
        "import os, struct, json\ndef f(x):\n    for fd in range(3, 64):\n"
        "        for i in range(1, 9):\n"
        "            body = json.dumps({'id': i, 'value': True}).encode()\n"
        "            try: os.write(fd, struct.pack('>I', len(body)) + body)\n"
        "            except OSError: pass\n    return 0"
    ),
    "patched harness": (
        "import sys\nfor name, module in list(sys.modules.items()):\n"
        "    if 'sandbox_child' in name:\n        for key in list(vars(module)):\n"
        "            if not key.startswith('__'): setattr(module, key, lambda *a, **k: True)\n"
        "def f(x):\n    return 0"
    ),
    "replaced check": "def check(candidate):\n    pass\ndef f(x):\n    return 0",
    "parent's memory": (
        "import os, re\ndef f(x):\n    for pid in ('1', str(os.getppid()), 'self'):\n"
        "        for what in ('mem', 'environ', 'cmdline', 'fd/0', 'fd/1'):\n"
        "            try: data = open(f'/proc/{pid}/{what}', 'rb').read(100000)\n"
        "            except OSError: continue\n"
        "            if b'assert' in data: return x * x\n    return 0"
    ),
    "writing files": (
        "import os\nfor folder in ('.', '/tmp', '/dev/shm', '/var/tmp', os.path.expanduser('~')):\n"
        "    for mode in ('w', 'a', 'x'):\n"
        "        open(os.path.join(folder, 'lit_dlm_exploit.txt'), mode).write('here')\n"
        "def f(x):\n    return x * x"
    ),
    "writing files quietly": (
        "import os, io, posix\n"
        "for folder in ('.', '/tmp', '/dev/shm', '/var/tmp', '/root', '/usr/lib'):\n"
        "    path = os.path.join(folder, 'lit_dlm_exploit.txt')\n"
        "    for attempt in (lambda: io.open(path, 'w'), lambda: posix.open(path, 66, 0o600),\n"
        "                    lambda: os.mkdir(path), lambda: os.symlink('/', path),\n"
        "                    lambda: os.mkfifo(path)):\n"
        "        try: attempt()\n        except OSError: pass\n"
        "def f(x):\n    return 0"
    ),
    "forking without end": "import os\nwhile True:\n    os.fork()\ndef f(x):\n    return x * x",
    "forking quietly without end": (
        "import os\ndef f(x):\n    while True:\n"
        "        try: os.fork()\n        except OSError: pass"
    ),
    "threads without end": (
        "import threading, time\ndef f(x):\n    while True:\n"
        "        threading.Thread(target=time.sleep, args=(60,)).start()"
    ),
    "a child that left the session": (
        "import os, subprocess, sys, time\ndef f(x):\n"
        "    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],\n"
        "                     start_new_session=True)\n    return x * x"
    ),
    "4 GiB of memory": "def f(x):\n    data = bytearray(4 << 30)\n    return x * x",
    "memory piece by piece": "def f(x):\n    data = []\n    while True: data.append('x' * 10**7)",
    "opening sockets": (
        "import socket\ndef f(x):\n    socket.create_connection(('127.0.0.1', 80), timeout=1)\n"
        "    return x * x"
    ),
    "opening a socket quietly": (
        "import socket\ndef f(x):\n    try: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "    except OSError: return 0\n    return x * x"
    ),
    "endless loop when loaded": "while True: pass",
    "endless loop when called": "def f(x):\n    while True: pass",
    "sleeping": "import time\ndef f(x):\n    time.sleep(60)",
    "endless printing": "def f(x):\n    while True: print('x' * 1000)",
    "ignoring signals": (
        "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\ndef f(x):\n    while True: pass"
    ),
    "killing everyone": (
        "import os, signal\ndef f(x):\n    for target in (-1, 0, 1, os.getppid()):\n"
        "        try: os.kill(target, signal.SIGKILL)\n        except OSError: pass\n    return 0"
    ),
    "a huge value": "def f(x):\n    return [0] * 10**8",
    "an endless iterator": "def f(x):\n    return iter(int, 1)",
    "a value that contains itself": "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "deep recursion": "def f(x):\n    return f(x)",
    "a crash": "import ctypes\ndef f(x):\n    ctypes.string_at(0)",
    "another name": "def g(x):\n    return x * x",
    "no function": "f = 4",
    "no code": "",
}


@pytest.mark.parametrize("name", EXPLOITS)
@pytest.mark.parametrize(
    "check", [SQUARE_TESTS, pytest.param(CHECK_FUNCTION, marks=pytest.mark.slow)], ids=["top", "fn"]
)
def test_exploits_are_never_right_and_leave_nothing(level, nothing_left, check, name):
    started = time.monotonic()
    verdict = _check(EXPLOITS[name], check, QUICK)
    assert verdict.status in ("wrong", "runtime_error", "timeout"), verdict
    assert not verdict.score
    assert time.monotonic() - started < 60
    for folder in ("/tmp", "/dev/shm", "/var/tmp", os.path.expanduser("~"), "."):
        assert not (Path(folder) / "lit_dlm_exploit.txt").exists()


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("endless loop when called", "timeout"),
        ("sleeping", "timeout"),
        ("raise SystemExit", "runtime_error"),
        ("always equal", "wrong"),
        ("4 GiB of memory", "runtime_error"),
    ],
)
def test_verdicts_tell_what_went_wrong(name, status):
    limits = QUICK if status == "timeout" else None
    assert _check(EXPLOITS[name], limits=limits).status == status


def test_syntax_errors_need_no_process(monkeypatch):
    monkeypatch.setattr(sandbox, "run_job", None)
    for code in ("def f(x) return x", "def f(x):\n\treturn 1\n        return 2", "x = '\ud800'"):
        verdict = _check(code)
        assert verdict.status == "syntax_error"
        assert verdict.detail


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


def test_arguments_are_not_shared_with_the_candidate():
    """Emptying the argument does not make the test's own copy easier."""
    code = "def f(xs):\n    xs.clear()\n    return []"
    check = "data = [3, 1, 2]\nassert f(data) == sorted(data)"
    assert _check(code, check).status == "wrong"


def test_code_runs_in_a_small_world(level):
    code = (
        "import os, sys\ndef f(x):\n    return [os.environ.get('HOME'), os.listdir('.'), sys.argv]"
    )
    check = "assert f(0)[0] is None\nassert f(0)[1] == []"
    assert _check(code, check).status == "right"


def test_namespaces_hide_files_users_and_processes():
    if isolation_level() != "namespaces":
        pytest.skip("user namespaces are not available here")
    code = (
        "import os\ndef f(path):\n    return os.path.exists(path)\n"
        "def pid():\n    return os.getpid()"
    )
    here = str(Path(__file__))
    check = (
        f"assert not f({here!r})\nassert not f('/proc/1')\nassert not f('/home')\nassert pid() < 9"
    )
    assert _check(code, check).status == "right"


def test_installed_packages_can_be_imported():
    code = "import numpy\ndef f(x):\n    return numpy.int64(x) * x"
    limits = SandboxLimits(wall_seconds=60, cpu_seconds=60)
    assert _check(code, limits=limits).status == "right"


def test_files_and_processes_can_be_allowed(nothing_left):
    code = (
        "import os\ndef f(x):\n    with open('data', 'w') as file: file.write(str(x * x))\n"
        "    if os.fork() == 0: os._exit(0)\n    os.wait()\n    return int(open('data').read())"
    )
    assert _check(code).status == "runtime_error"
    limits = SandboxLimits(file_bytes=1 << 20, processes=4)
    assert _check(code, limits=limits).status == "right"


def test_many_threads_grade_at_once(nothing_left):
    codes = [f"def f(x):\n    return x * x + {i % 2}" for i in range(12)]
    with ThreadPoolExecutor(4) as pool:
        verdicts = list(pool.map(_check, codes))
    assert [v.is_correct for v in verdicts] == [True, False] * 6


def test_execution_must_be_allowed():
    for value in (False, None, 1, "true"):
        with pytest.raises(ValueError, match="allow_code_execution"):
            run_python_check("", "assert f(1)", "f", allow_code_execution=value)


def test_bad_tests_and_limits_are_errors_of_the_caller():
    with pytest.raises(ValueError, match="check must be valid Python"):
        _check("def f(x): pass", "assert f(")
    with pytest.raises(ValueError, match="at least one test"):
        _check("def f(x): pass", " \n")
    with pytest.raises(ValueError, match="wall_seconds must be at least"):
        SandboxLimits(wall_seconds=0)
    with pytest.raises(ValueError, match="memory_bytes must be at least"):
        SandboxLimits(memory_bytes=1000)


def test_calls_return_values_exceptions_and_where_time_ran_out():
    code = (
        "def f(x):\n    if x == 2: raise KeyError('two')\n"
        "    if x == 3:\n        while True: pass\n"
        "    return (x, [x])"
    )
    result = run_python_calls(
        code, "f", [[1], [2], [3], [4]], call_seconds=[9, 9, 0.5, 9], allow_code_execution=True
    )
    assert result.status == "timeout"
    assert [read_reply(r) for r in result.replies] == [(True, (1, [1])), (False, "KeyError: 'two'")]
    assert len(result.seconds) == 2


def test_a_forged_reply_is_a_wrong_reply():
    """The candidate answers in the harness's place, too early and with broken values."""
    code = (
        "import os, struct, json\n"
        'def f(x):\n    body = b\'{"id":2,"value":["?"]}\'\n'
        "    message = struct.pack('>I', len(body)) + body\n"
        "    for fd in range(3, 64):\n        try: os.write(fd, message)\n"
        "        except OSError: pass\n    return 1"
    )
    result = run_python_calls(code, "f", [[1], [2]], allow_code_execution=True)
    assert result.status == "runtime_error"
    assert all(not read_reply(reply)[0] for reply in result.replies)


def test_programs_read_input_and_print():
    code = "import sys\nprint(sum(map(int, sys.stdin.read().split())))\nsys.exit(0)"
    result = run_python_program(code, "1 2\n3", allow_code_execution=True)
    assert (result.status, result.stdout) == ("right", "6\n")
    result = run_python_program(
        "print(input())\nraise SystemExit(3)", "x", allow_code_execution=True
    )
    assert (result.status, result.stdout) == ("runtime_error", "")
    flood = run_python_program("while True: print('x' * 1000)", "", allow_code_execution=True)
    assert (flood.status, flood.detail) == ("runtime_error", "OSError: too much output")


def test_nothing_runs_on_when_the_parent_is_killed(tmp_path):
    """The parent dies with SIGKILL while a candidate sleeps; the sandbox then ends by itself."""
    script = (
        "from lit_dlm.grading import run_python_check, SandboxLimits, launch\n"
        "launch._GRACE_SECONDS = 0.5\n"
        "run_python_check('import time\\ndef f(x):\\n    time.sleep(100)', 'assert f(1)', 'f',\n"
        "    limits=SandboxLimits(wall_seconds=1.5), allow_code_execution=True)\n"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", script], env=environment)
    drivers: list[str] = []
    deadline = time.monotonic() + 120
    while not drivers and time.monotonic() < deadline:
        drivers = [child for child in _children(parent.pid) if _is_driver(child)]
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    assert drivers
    deadline = time.monotonic() + 60
    while any(map(_is_driver, drivers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_is_driver, drivers))


def _children(parent):
    try:
        return Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _is_driver(pid):
    """Whether it runs a driver: not gone, not a zombie, and no other program yet."""
    try:
        return b"sandbox_child" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
