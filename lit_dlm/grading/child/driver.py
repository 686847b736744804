"""The trusted process of one sample: forks the worker, then runs the tests against proxies.

Order matters. The worker is forked off a bare interpreter *before* the tests, the inputs and the
nonce are read from standard input, so no copy of them ever exists in the process that runs the
candidate; the candidate's code in turn never runs in this process.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from typing import Any, NoReturn

from . import isolate, wire, worker
from .remote import Remote, RemoteFunction, WorkerLostError

_TESTS = "<tests>"


def main() -> NoReturn:
    """Reads settings from the command line and the job from standard input; prints the result."""
    config = json.loads(sys.argv[1])
    signal.signal(signal.SIGALRM, _give_up)
    signal.setitimer(signal.ITIMER_REAL, config["wall_seconds"] + config["grace_seconds"])
    channel, first_child, life_fd = _start_worker(config)
    # From here on there is something to protect.
    isolate.hide_memory()
    job = json.loads(sys.stdin.buffer.read())
    resource.setrlimit(resource.RLIMIT_AS, (int(config["memory_bytes"]),) * 2)
    remote = Remote(
        channel,
        wall_seconds=config["wall_seconds"],
        value_bytes=int(config["value_bytes"]),
        explain_end=lambda: _explain_end(config["level"], first_child),
    )
    replies: list[bytes] = []
    try:
        remote.wait_until_ready(seconds=config["grace_seconds"])
        if job["mode"] == "check":
            result = _run_check(job, remote)
        elif job["mode"] == "calls":
            result = _run_calls(job, remote, replies)
        else:
            text = remote.run_program(job["code"], job["stdin"])
            result = {"status": "right", "detail": "", "stdout": text}
    except WorkerLostError as lost:
        result = {"status": lost.status, "detail": lost.detail}
    except Exception as error:  # the candidate's error while loading, any class
        status, detail = remote.failure or ("runtime_error", f"{type(error).__name__}: {error}")
        result = {"status": status, "detail": detail}
    os.close(life_fd)
    isolate.kill_descendants()
    head = json.dumps({**result, "nonce": job["nonce"]}).encode()
    sys.stdout.buffer.write(wire.pack([head, *replies]))
    sys.stdout.buffer.flush()
    os._exit(0)


def _give_up(_signal: int, _frame: Any) -> NoReturn:
    isolate.kill_descendants()
    os._exit(124)


def _start_worker(config: dict[str, Any]) -> tuple[wire.Channel, int, int]:
    """Forks the worker behind its walls.

    Returns:
        The channel to it, the process id of our direct child, and the write end of a pipe whose
        closing ends the namespace.
    """
    request_read, request_write = os.pipe()
    reply_read, reply_write = os.pipe()
    life_read, life_write = os.pipe()
    isolate.become_reaper()
    in_namespaces = config["level"] == "namespaces"
    two_users = isolate.enter_namespaces() if in_namespaces else False
    child = os.fork()
    if child == 0:
        try:
            null = os.open("/dev/null", os.O_RDWR)
            for standard in (0, 1, 2):
                os.dup2(null, standard)
            for other in (null, request_write, reply_read, life_write):
                os.close(other)

            def serve() -> NoReturn:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                os.setsid()
                owns_user = in_namespaces or config["user"] is not None
                isolate.limit_resources(config, owns_user=owns_user)
                isolate.drop_privileges(1 if two_users else config["user"], config)
                worker.main(request_read, reply_write, config)

            if in_namespaces:
                isolate.build_root(
                    config["scratch"],
                    library_folders=config["shown_folders"],
                    scratch_bytes=int(config["file_bytes"]),
                )
                isolate.run_as_process_one(serve, keep_open=life_read)
            os.close(life_read)
            os.chdir(config["scratch"])
            serve()
        finally:
            os._exit(125)
    for other in (request_read, reply_write, life_read):
        os.close(other)
    os.set_blocking(request_write, False)
    channel = wire.Channel(reply_read, request_write, max_bytes=int(config["value_bytes"]))
    return channel, child, life_write


def _explain_end(level: str, child: int) -> tuple[str, str]:
    """Says why the worker is gone: the status of our direct child tells."""
    deadline = time.monotonic() + 1.0
    status = 0
    while time.monotonic() < deadline:
        try:
            pid, status = os.waitpid(child, os.WNOHANG)
        except ChildProcessError:
            break
        if pid:
            break
        time.sleep(0.002)
    code = os.waitstatus_to_exitcode(status)
    if level == "namespaces" and code > 128:
        code = 128 - code
    if -code in (signal.SIGXCPU, signal.SIGKILL):
        return "timeout", "the processor time limit was reached"
    if code < 0:
        return "runtime_error", f"the process was ended by {signal.Signals(-code).name}"
    return "runtime_error", f"the process ended early with exit code {code}"


def _run_check(job: dict[str, Any], remote: Remote) -> dict[str, Any]:
    """Runs the tests against proxies of the candidate.

    ``check(candidate)`` is called when the tests define it (HumanEval); otherwise each top-level
    statement runs on its own (MBPP), so that the share of passing assertions is known.
    """
    namespace: dict[str, Any] = {"__name__": "tests"}
    exec(compile(job["preamble"], "<preamble>", "exec"), namespace)
    names = remote.load(job["code"])
    entry_point = job["entry_point"]
    if entry_point not in names:
        return {"status": "runtime_error", "detail": f"no function {entry_point!r} is defined"}
    tree = ast.parse(job["check"])
    candidate = namespace[entry_point] = RemoteFunction(remote, entry_point)
    _bind_free_names(tree, namespace, names, remote)
    defines_check = any(isinstance(n, ast.FunctionDef) and n.name == "check" for n in tree.body)
    if defines_check:
        exec(compile(tree, _TESTS, "exec"), namespace)
        failure = _attempt(lambda: namespace["check"](candidate), job["check"], remote)
        return failure or {"status": "right", "detail": ""}
    return _run_statements(tree, job["check"], namespace, remote)


def _run_statements(
    tree: ast.Module, source: str, namespace: dict[str, Any], remote: Remote
) -> dict[str, Any]:
    total = sum(isinstance(node, ast.Assert) for node in tree.body)
    passed = 0
    first_failure: dict[str, Any] | None = None
    for node in tree.body:
        code = compile(ast.Module([node], []), _TESTS, "exec")
        try:
            failure = _attempt(lambda code=code: exec(code, namespace), source, remote)
        except WorkerLostError as lost:
            failure = {"status": lost.status, "detail": lost.detail}
            first_failure = first_failure or failure
            break  # the worker may still be busy with this call: it answers no other
        first_failure = first_failure or failure
        passed += isinstance(node, ast.Assert) and failure is None
    result = first_failure or {"status": "right", "detail": ""}
    return {**result, "passed": passed, "total": total}


def _attempt(test: Any, source: str, remote: Remote) -> dict[str, Any] | None:
    """Runs one test; returns ``None`` or how it failed."""
    remote.failure = None
    try:
        test()
    except AssertionError as error:
        if remote.failure is None:
            return {"status": "wrong", "detail": _failing_line(error, source)}
        status, detail = remote.failure
    except Exception as error:  # tests may raise anything on a strange value
        status, detail = remote.failure or ("wrong", f"{type(error).__name__}: {error}"[:500])
    else:
        return None
    return {"status": status, "detail": detail}


def _failing_line(error: AssertionError, source: str) -> str:
    lines = source.splitlines()
    numbers = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == _TESTS]
    if numbers and numbers[-1] is not None and numbers[-1] <= len(lines):
        return lines[numbers[-1] - 1].strip()[:500]
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
            namespace[name] = RemoteFunction(remote, name)


def _run_calls(job: dict[str, Any], remote: Remote, replies: list[bytes]) -> dict[str, Any]:
    """Calls the entry point with each encoded argument list and collects the replies unread.

    Stops at the first call over its time: the worker is still busy with it. An exception of the
    candidate is a reply like any other.
    """
    names = remote.load(job["code"])
    entry_point = job["entry_point"]
    if entry_point not in names:
        return {"status": "runtime_error", "detail": f"no function {entry_point!r} is defined"}
    taken: list[float] = []
    result: dict[str, Any] = {"status": "right", "detail": "", "taken": taken}
    try:
        for args, seconds in zip(job["calls"], job["call_seconds"], strict=True):
            started = time.perf_counter()
            replies.append(remote.call_encoded(entry_point, args, seconds=seconds))
            taken.append(time.perf_counter() - started)
    except WorkerLostError as lost:
        result.update(status=lost.status, detail=lost.detail)
    return result
