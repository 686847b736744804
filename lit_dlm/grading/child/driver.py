"""The trusted process of one sample: forks the worker, then runs the tests against proxies.

It is behind the same walls as the worker and has limits of its own, because it parses and compares
values that the candidate made. Order matters: the worker is forked off a bare interpreter
*before* the tests, the inputs and the nonce are read from standard input, so no copy of them ever
exists in the process that runs the candidate, whose code in turn never runs in this process.
"""

from __future__ import annotations

import _thread
import ast
import binascii
import builtins
import contextlib
import json
import math
import os
import resource
import select
import signal
import sys
import time
import zlib
from typing import Any, NoReturn

from . import compare, isolate, wire, worker
from .remote import Handle, Remote, WorkerLostError

READY = b"ready\n"  # printed once the walls are up: what fails from then on is the sample's fault
_TESTS = "<tests>"
_MAX_DETAIL = 500
_stopped: set[int] = set()


def main() -> NoReturn:
    """Reads settings from the command line and the job from standard input; prints the result."""
    config = json.loads(sys.argv[1])
    os.read(0, 1)  # the newline sent once this process is in its cgroup; nothing of the job yet
    isolate.put_up_walls(
        config["level"], folders=config["folders"], user=config["user"], parent=config["parent"]
    )
    # The kernel's own alarm: a handler in Python would wait for the end of a comparison.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.setitimer(signal.ITIMER_REAL, config["setup_seconds"])
    # Standard input, output and error of a program, which is a whole process of its own.
    names = ("in", "out", "err") if config["mode"] == "program" else ()
    files = [os.memfd_create(name) for name in names] or [os.open("/dev/null", os.O_RDWR)] * 3
    channel, worker_pid = _start_worker(config, files)
    if config["others_tasks"] is not None:
        _thread.start_new_thread(_watch_threads, (worker_pid,))
    # From here on there is something to protect.
    job = json.loads(sys.stdin.buffer.read())
    remote = Remote(
        channel,
        wall_seconds=config["wall_seconds"],
        call_seconds=config["call_seconds"],
        value_bytes=int(config["value_bytes"]),
        explain_end=lambda: _explain_end(worker_pid, config["cpu_seconds"]),
    )
    try:
        remote.wait_until_ready()
    except wire.ChannelClosedError:
        _explain_end(worker_pid, config["cpu_seconds"])
        raise
    signal.setitimer(signal.ITIMER_REAL, config["wall_seconds"] + 1.0)
    isolate.set_limit(resource.RLIMIT_AS, int(config["memory_bytes"]))
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    try:
        if job["mode"] == "program":
            result = _run_program(job, remote, files, worker_pid, config["cpu_seconds"])
        else:
            result = _run(job, remote)
    except WorkerLostError as lost:
        result = _verdict(lost.status, lost.detail)
    except Exception as error:  # the candidate's error while loading, any class
        result = _verdict(
            *(remote.failure or ("runtime_error", f"{type(error).__name__}: {error}"))
        )
    result["detail"] = result["detail"][:_MAX_DETAIL]
    sys.stdout.buffer.write(json.dumps({**result, "nonce": job["nonce"]}).encode())
    sys.stdout.buffer.flush()
    os._exit(0)


def _verdict(status: str, detail: str, **more: Any) -> dict[str, Any]:
    return {"status": status, "detail": detail, **more}


def _run(job: dict[str, Any], remote: Remote) -> dict[str, Any]:
    names = remote.load(job["code"])
    if job["entry_point"] not in names:
        return _verdict("runtime_error", f"no function {job['entry_point']!r} is defined")
    if job["mode"] == "check":
        return _run_check(job, names, remote)
    return (_record_calls if job["mode"] == "record" else _compare_calls)(job, remote)


def _run_program(
    job: dict[str, Any], remote: Remote, files: list[int], worker_pid: int, cpu_seconds: float
) -> dict[str, Any]:
    """Runs the candidate to the end of its process; its output counts if the exit code is 0."""
    stdin, stdout, stderr = files
    os.pwrite(stdin, job["stdin"].encode(), 0)  # the worker shares the file's position
    remote.start_program(job["code"])
    if not _has_ended(worker_pid, remote.seconds_left()):
        return _verdict("timeout", "no end within the time limit")
    end = os.waitid(os.P_PID, worker_pid, os.WEXITED | os.WNOWAIT)
    size = os.fstat(stdout).st_size
    if end is None or end.si_code != os.CLD_EXITED:
        return _verdict(*_explain_end(worker_pid, cpu_seconds))
    if end.si_status:
        written = os.pread(stderr, 4096, max(0, os.fstat(stderr).st_size - 4096))
        lines = [f"exit code {end.si_status}", *written.decode(errors="replace").splitlines()]
        return _verdict("runtime_error", lines[-1])
    if size > (most := job["output_bytes"]):
        return _verdict("runtime_error", f"{size} bytes of output are over {most}")
    text = os.pread(stdout, size, 0).decode(errors="replace")
    return _verdict("right", "", stdout=text)


def _start_worker(config: dict[str, Any], files: list[int]) -> tuple[wire.Channel, int]:
    request_read, request_write = os.pipe()
    reply_read, reply_write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            isolate.confine(
                cpu_seconds=config["cpu_seconds"],
                memory_bytes=int(config["memory_bytes"]),
                others_tasks=config["others_tasks"],
            )
        except OSError as error:
            sys.stderr.write(f"{error}\n")
            os._exit(125)
        for standard, file in enumerate(files):
            os.dup2(file, standard)
        # Only the worker's own ends of the pipes may be left to the candidate.
        for other in {request_write, reply_read, *files}:
            os.close(other)
        worker.main(request_read, reply_write, config)
    for other in (request_read, reply_write):
        os.close(other)
    # A worker that reads nothing must not hold the driver beyond its deadline.
    os.set_blocking(request_write, False)
    return wire.Channel(reply_read, request_write, max_bytes=int(config["value_bytes"])), child


def _explain_end(worker_pid: int, cpu_seconds: float) -> tuple[str, str]:
    """Returns why the worker is gone; ends in the same way if it was killed from outside."""
    # It may have closed its pipes and still be running.
    if not _has_ended(worker_pid, 1.0):
        return "runtime_error", "the process closed its connection"
    _, status, usage = os.wait4(worker_pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if worker_pid in _stopped:
        return "runtime_error", f"it had more than {isolate.MOST_THREADS} threads"
    if code == -signal.SIGKILL and usage.ru_utime + usage.ru_stime < cpu_seconds - 0.5:
        os._exit(128 + signal.SIGKILL)
    if -code in (signal.SIGXCPU, signal.SIGKILL):
        return "timeout", "the processor time limit was reached"
    if code < 0:
        return "runtime_error", f"the process was ended by {signal.Signals(-code).name}"
    return "runtime_error", f"the process ended early with exit code {code}"


def _watch_threads(worker_pid: int) -> None:
    """Kills a worker with too many threads, where the kernel's limit covers all of a user's."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        # A folder has two links plus one for each subfolder, here one per thread.
        while os.stat(f"/proc/{worker_pid}/task").st_nlink - 2 <= isolate.MOST_THREADS + 1:
            time.sleep(0.01)
        _stopped.add(worker_pid)
        os.kill(worker_pid, signal.SIGKILL)


def _has_ended(worker_pid: int, seconds: float) -> bool:
    return bool(select.select([os.pidfd_open(worker_pid)], [], [], seconds)[0])


def _run_check(job: dict[str, Any], names: list[str], remote: Remote) -> dict[str, Any]:
    """Runs the tests against proxies of the candidate, each top-level statement on its own."""
    # No name of the tests leads to the candidate's code, only to proxies of it.
    candidate = Handle(remote, job["entry_point"])
    namespace: dict[str, Any] = {"__name__": "tests", "__candidate__": candidate}
    exec(compile(job["preamble"], "<preamble>", "exec"), namespace)
    namespace[job["entry_point"]] = candidate  # HumanEval's preamble has a stub of that name
    tree = ast.parse(job["check"])
    _bind_free_names(tree, namespace, names, remote)
    total = sum(isinstance(node, ast.Assert) for node in tree.body)
    if any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body):
        tree.body += ast.parse("check(__candidate__)").body
        total = 0
    failures: list[tuple[str, str]] = []
    passed = 0
    for node in tree.body:
        code = compile(ast.Module([node], []), _TESTS, "exec")
        remote.failure, remote.unsent = None, ""
        try:
            exec(code, namespace)
            if remote.unsent:  # the tests took this error of ours for one of the candidate
                failures.append(("wrong", remote.unsent))
            else:
                passed += isinstance(node, ast.Assert)
        except AssertionError as error:
            failures.append(remote.failure or ("wrong", _failing_line(error, job["check"])))
        except Exception as error:  # tests may raise anything on a strange value
            failures.append(remote.failure or ("wrong", f"{type(error).__name__}: {error}"))
        except WorkerLostError as lost:
            failures.append((lost.status, lost.detail))
            break  # the worker may still be busy with this call, so it would answer no other
    status, detail = failures[0] if failures else ("right", "")
    return _verdict(status, detail, passed=passed, total=total)


def _failing_line(error: AssertionError, source: str) -> str:
    lines, number = source.splitlines(), 0
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _TESTS:
            number = trace.tb_lineno
        trace = trace.tb_next
    if 0 < number <= len(lines):
        return lines[number - 1].strip()
    return "an assertion failed"


def _bind_free_names(
    tree: ast.Module, namespace: dict[str, Any], candidate_names: list[str], remote: Remote
) -> None:
    """Binds names the tests use but do not define: library modules, then the candidate's own.

    Tests of MBPP call classes that the solution must define (``Pair(5, 24)``). Names that the
    preamble defines (HumanEval's ``poly``) stay the preamble's: the candidate cannot replace them.
    """
    nodes = list(ast.walk(tree))
    used = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    modules = {
        n.value.id for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)
    }
    for name in sorted(used):
        if name in namespace or hasattr(builtins, name):
            continue
        if name in modules and name in sys.stdlib_module_names:
            with contextlib.suppress(ImportError):
                namespace[name] = __import__(name)
        elif name in candidate_names:
            namespace[name] = Handle(remote, name)


def _record_calls(job: dict[str, Any], remote: Remote) -> dict[str, Any]:
    """Calls the reference with each argument list; keeps what it returned, "" if too large."""
    taken: list[float] = []
    truths: list[str] = []
    for number, args in enumerate(job["calls"]):
        started = time.perf_counter()
        reply = remote.call_encoded(job["entry_point"], args, seconds=math.inf)
        taken.append(time.perf_counter() - started)
        if reply.startswith(b'"error":["WireError"'):
            truths.append("")
            continue
        if not reply.startswith(b'"value":'):
            _, error = compare.read_reply(reply)
            return _verdict("runtime_error", f"input {number}: {error}")
        truths.append(binascii.b2a_base64(zlib.compress(reply, 1), newline=False).decode())
    return _verdict("right", "", taken=taken, truths=truths)


def _compare_calls(job: dict[str, Any], remote: Remote) -> dict[str, Any]:
    """Judges what the entry point returns, until a call exceeds its time and blocks the worker."""
    rule = compare.RULES[job["rule"]]
    passed = number = 0
    failures: list[tuple[int, str, str]] = []
    columns = (job[name] for name in ("calls", "call_seconds", "alternatives", "truths"))
    calls = zip(*columns, strict=True)
    try:
        for number, (args, seconds, alternative, truth) in enumerate(calls):
            reply = remote.call_encoded(job["entry_point"], args, seconds=seconds)
            case = compare.Case(inputs=args, alternative=alternative, atol=job["atol"])
            failure = compare.judge(rule, reply, zlib.decompress(binascii.a2b_base64(truth)), case)
            if failure is None:
                passed += 1
            else:
                failures.append((number, *failure))
    except WorkerLostError as lost:
        failures.append((number, lost.status, lost.detail))
    failed, status, detail = failures[0] if failures else (None, "right", "")
    return _verdict(status, detail, passed=passed, failed=failed)
