"""Processes with limits of their own that answer questions about untrusted text."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any, Literal

from lit_dlm.grading.sandbox import BOOT, CHILD_FOLDER, SandboxError, bare_environment

Kind = Literal["extraction", "math", "template"]


class _Process:
    def __init__(self, kind: Kind) -> None:
        # Extraction needs the standard library alone and starts in milliseconds.
        flags = ["-I", "-S", "-X", "utf8"] if kind == "extraction" else ["-I", "-X", "utf8"]
        self._process = subprocess.Popen(
            [sys.executable, *flags, "-c", BOOT, CHILD_FOLDER, "bounded", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=bare_environment(),
            start_new_session=True,  # an interrupt at the terminal is the run's to handle
        )
        if self._read() != "ready":
            self.kill()
            needs = "; is math-verify installed?" if kind == "math" else ""
            raise SandboxError(f"the process for {kind} did not start{needs}")

    def ask(self, question: Mapping[str, Any], *, seconds: float) -> Any:
        assert self._process.stdin is not None
        request = json.dumps({"question": {**question}, "seconds": seconds})
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(request.encode() + b"\n")
            self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        # No deadline here: the kernel's alarm ends the other process, and the pipe is closed.
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line.endswith(b"\n") else None

    def kill(self) -> None:
        # Leaving the block closes the pipes, perhaps with an unread question in one, and waits.
        with contextlib.suppress(BrokenPipeError), self._process:
            self._process.kill()


class BoundedProcesses:
    """A pool of answering processes: one per thread that asks at the same time.

    One that overran its time is killed. A forked child starts processes of its own.
    """

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._owner = os.getpid()
        atexit.register(self.close)

    def ask(self, question: Mapping[str, Any], *, seconds: float) -> Any:
        """Returns the answer of :mod:`.child.bounded`, or ``None`` if none came in time."""
        process = self._idle_or_new()
        answer = None
        try:
            answer = process.ask(question, seconds=seconds)
        finally:
            if answer is None:  # overrun: a late answer must not go to the next question
                process.kill()
            else:
                with self._lock:
                    self._idle.append(process)
        return answer

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        if self._owner == os.getpid():
            for process in idle:
                process.kill()

    def _idle_or_new(self) -> _Process:
        with self._lock:
            # A forked child has the pipes, but would read the answers to its parent's questions.
            if self._owner != os.getpid():
                self._owner, self._idle = os.getpid(), []
            if self._idle:
                return self._idle.pop()
        return _Process(self._kind)


@functools.cache
def shared_processes(kind: Kind) -> BoundedProcesses:
    """Returns the pool of this process."""
    return BoundedProcesses(kind)
