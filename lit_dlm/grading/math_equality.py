"""Equality of mathematical expressions, decided by math-verify in processes we can kill."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

logger = logging.getLogger(__name__)

MAX_ANSWER_CHARACTERS = 1000
"""Longer answers are wrong without a comparison; gold answers of MATH have at most about 150."""

_START_SECONDS = 120.0
_SCRIPT = Path(__file__).parent / "child" / "math_worker.py"


class MathEqualityError(RuntimeError):
    """The comparing process cannot be started; says nothing about any answer."""


class _Process:
    """One comparing process and the pipe to it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-X", "utf8", str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        if self._read_line(_START_SECONDS) != "ready":
            self.kill()
            raise MathEqualityError("the math-verify process did not start; is it installed?")

    def ask(self, gold: str, answer: str, *, seconds: float) -> bool | None:
        """Compares; ``None`` when no reply came in time or the process broke."""
        assert self._process.stdin is not None
        try:
            request = json.dumps({"gold": gold, "answer": answer})
            self._process.stdin.write(request.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        line = self._read_line(seconds)
        return None if line is None else bool(json.loads(line)["equal"])

    def _read_line(self, seconds: float) -> str | None:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + seconds
        line = b""
        while not line.endswith(b"\n"):
            left = max(0.0, deadline - time.monotonic())
            if not select.select([descriptor], [], [], left)[0]:
                return None
            chunk = os.read(descriptor, 4096)
            if not chunk:
                return None
            line += chunk
        return line.decode().strip()

    def kill(self) -> None:
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._process.wait()


class MathEquality:
    """A pool of comparing processes: one per thread that asks at the same time.

    Idle processes are kept for the next question; one that overran its time is killed and a fresh
    one is started when next needed (about 2 s). Safe to share between threads; a forked child
    starts processes of its own.
    """

    def __init__(self, *, seconds: float = 5.0) -> None:
        """Starts nothing yet.

        Args:
            seconds: Wall limit of one comparison.
        """
        if not seconds > 0:
            raise ValueError(f"seconds must be positive, got {seconds!r}")
        self.seconds = seconds
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._owner = os.getpid()
        atexit.register(self.close)

    def equal(self, gold: str, answer: str) -> bool | None:
        r"""Whether two LaTeX expressions are equal.

        Args:
            gold: The true answer, the content of a ``\boxed{}``.
            answer: The answer to judge, likewise.

        Returns:
            The verdict, or ``None`` if it could not be reached within the limit.
        """
        if len(answer) > MAX_ANSWER_CHARACTERS:
            return False
        process = self._take()
        verdict = None
        try:
            verdict = process.ask(gold, answer, seconds=self.seconds)
        finally:
            if verdict is None:
                process.kill()
            else:
                with self._lock:
                    self._idle.append(process)
        if verdict is None:
            logger.info("no verdict on %r against %r in %s s", answer, gold, self.seconds)
        return verdict

    def close(self) -> None:
        """Ends all idle processes."""
        with self._lock:
            idle, self._idle = self._idle, []
        if self._owner == os.getpid():
            for process in idle:
                process.kill()

    def _take(self) -> _Process:
        with self._lock:
            if self._owner != os.getpid():
                self._owner, self._idle = os.getpid(), []
            if self._idle:
                return self._idle.pop()
        return _Process()


_shared: MathEquality | None = None
_shared_lock = threading.Lock()


def shared_math_equality() -> MathEquality:
    """The pool that all graders of this process share."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = MathEquality()
        return _shared
