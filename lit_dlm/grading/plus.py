"""Grading by inputs and a reference solution: the tests of HumanEval+ and MBPP+ (arXiv 2305.01210).

Both the candidate and the reference solution run in the sandbox; what they returned is compared in
this process by EvalPlus's rules. Expected outputs are computed when a problem is first graded, kept
in memory, and optionally as JSON in a private folder. Nothing is pickled.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lit_dlm.grading.child import wire
from lit_dlm.grading.code import outputs_match
from lit_dlm.grading.launch import SandboxLimits
from lit_dlm.grading.sandbox import read_reply, run_python_calls
from lit_dlm.grading.verdict import Verdict

logger = logging.getLogger(__name__)

MatchRule = Callable[[Sequence[Any], Any, Any], bool]
"""``(inputs, output, expected) -> whether the output is right``."""

_LEAST_SECONDS = 1.0
_REFERENCE_FACTOR = 4.0
_MOST_SECONDS = 60.0
"""EvalPlus 0.3.1: each call may take 1 s or 4 times the reference, all calls together 60 s."""
_RUN_FACTOR = 2.0
"""Here all calls may always take twice as long as the reference did: some take a minute."""
_REFERENCE_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class PlusProblem:
    """One problem with its inputs."""

    name: str
    """Such as ``HumanEval/0``; used in messages."""
    entry_point: str
    """The function under test."""
    reference_code: str
    """A module whose ``entry_point`` is right by definition."""
    base_inputs: Sequence[Sequence[Any]]
    """Argument lists of the original tests."""
    plus_inputs: Sequence[Sequence[Any]]
    """Argument lists of the added tests."""
    atol: float = 0.0
    """Absolute tolerance of floats."""
    match: MatchRule | None = None
    """A rule in place of the comparison with tolerance, where one output is not the only right."""


@dataclass(frozen=True, kw_only=True)
class _Expected:
    replies: bytes
    """Packed and compressed values of the reference solution; empty where one is left out."""
    seconds: list[float]

    @classmethod
    def of(cls, values: Sequence[bytes], seconds: Sequence[float]) -> _Expected:
        return cls(replies=zlib.compress(wire.pack(values), 1), seconds=list(seconds))

    def unpack(self) -> list[bytes]:
        return wire.unpack(zlib.decompress(self.replies))


@dataclass(frozen=True)
class _Opaque:
    """Stands for a value that did not leave the sandbox, such as a regular expression's match."""

    number: int = field(compare=False)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


class PlusGrader:
    """Grades candidates against reference solutions.

    Args:
        limits: memory and the like for each run; its wall time bounds one run over all inputs.
        cache_dir: a folder for expected outputs, made with access for its owner only; ``None``
            keeps them in memory.
        allow_code_execution: must be true to grade.
    """

    def __init__(
        self,
        *,
        limits: SandboxLimits | None = None,
        cache_dir: str | None = None,
        allow_code_execution: bool,
    ) -> None:
        self._limits = limits or SandboxLimits(
            wall_seconds=_MOST_SECONDS + 1,
            cpu_seconds=_MOST_SECONDS + 1,
            memory_bytes=4 << 30,
            value_bytes=1 << 28,  # Mbpp/255 returns lists of millions of tuples
        )
        # The reference is trusted and must get through, also on a busy machine.
        self._reference_limits = replace(
            self._limits, wall_seconds=_REFERENCE_SECONDS, cpu_seconds=_REFERENCE_SECONDS
        )
        self._allow = allow_code_execution
        self._folder = None if cache_dir is None else _private_folder(cache_dir)
        self._expected: dict[str, _Expected] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def grade(self, code: str, problem: PlusProblem, *, base_only: bool = False) -> Verdict:
        """Runs a candidate on the original inputs and, if it passes them all, on the added ones.

        Args:
            code: A module that should define the entry point.
            problem: What to compare with.
            base_only: Leave the added inputs out.

        Returns:
            ``right`` if every output matches; ``score`` is the share of matching outputs among
            all inputs that count, those not run for an earlier failure counted as failed.

        Raises:
            ValueError: If code execution was not allowed, or the reference solution itself fails.
        """
        parts = [("base", problem.base_inputs)]
        if not base_only:
            parts.append(("plus", problem.plus_inputs))
        total = sum(len(inputs) for _, inputs in parts)
        passed = 0
        for part, inputs in parts:
            verdict, matches = self._grade_part(code, problem, part, inputs)
            passed += matches
            if not verdict.is_correct:
                return replace(verdict, score=passed / total)
        return Verdict(status="right", answer=code, score=1.0)

    def _grade_part(
        self, code: str, problem: PlusProblem, part: str, inputs: Sequence[Sequence[Any]]
    ) -> tuple[Verdict, int]:
        if not inputs:
            return Verdict(status="right", answer=code), 0
        expected = self._expected_of(problem, part, inputs)
        truths = expected.unpack()
        kept = [index for index, truth in enumerate(truths) if truth]
        spent = [expected.seconds[index] for index in kept]
        seconds = max(self._limits.wall_seconds, _RUN_FACTOR * sum(spent))
        result = run_python_calls(
            code,
            problem.entry_point,
            [inputs[index] for index in kept],
            call_seconds=[max(_LEAST_SECONDS, _REFERENCE_FACTOR * s) for s in spent],
            limits=replace(self._limits, wall_seconds=seconds, cpu_seconds=seconds),
            allow_code_execution=self._allow,
        )
        matches = len(inputs) - len(kept)
        first_failure: Verdict | None = None
        for index, reply in zip(kept, result.replies, strict=False):
            failure = _judge(problem, inputs[index], _value_part(reply), truths[index])
            matches += failure is None
            if failure is not None and first_failure is None:
                status, detail = failure
                detail = f"{part} input {index}: {detail}"
                first_failure = Verdict(status=status, answer=code, detail=detail)  # type: ignore[arg-type]
        if first_failure is None and result.status != "right":
            detail = f"{part} input {kept[len(result.replies)]}: {result.detail}"
            first_failure = Verdict(status=result.status, answer=code, detail=detail)
        return first_failure or Verdict(status="right", answer=code), matches

    def _expected_of(
        self, problem: PlusProblem, part: str, inputs: Sequence[Sequence[Any]]
    ) -> _Expected:
        key = f"{problem.name}/{part}/{problem.entry_point}"
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._expected:
                self._expected[key] = self._load_or_compute(problem, inputs)
            return self._expected[key]

    def _load_or_compute(self, problem: PlusProblem, inputs: Sequence[Sequence[Any]]) -> _Expected:
        encoded = json.dumps([wire.encode(tuple(args)) for args in inputs])
        digest = hashlib.sha256(f"{problem.reference_code}\n{encoded}".encode()).hexdigest()
        path = None if self._folder is None else self._folder / f"{digest}.json.gz"
        if path is not None and (stored := _read_expected(path, len(inputs))) is not None:
            return stored
        result = run_python_calls(
            problem.reference_code,
            problem.entry_point,
            inputs,
            call_seconds=_REFERENCE_SECONDS,
            limits=self._reference_limits,
            allow_code_execution=self._allow,
        )
        if result.status != "right":
            raise ValueError(
                f"{problem.name}: the reference solution failed on input {len(result.replies)}: "
                f"{result.detail}"
            )
        values = [_value_part(reply) for reply in result.replies]
        for index, value in enumerate(values):
            if value.startswith(b'"error":["WireError"'):
                # EvalPlus compares these in one process. It is 1 input of 41,015 in MBPP+.
                logger.info(
                    "%s: input %d is left out, its output is too large", problem.name, index
                )
                values[index] = b""
            elif not value.startswith(b'"value":'):
                raise ValueError(
                    f"{problem.name}: the reference solution failed on input {index}: "
                    f"{_read_value(value)[1]}"
                )
        if path is not None:
            _write_expected(path, values, result.seconds)
        return _Expected.of(values, result.seconds)


def _value_part(reply: bytes) -> bytes:
    """A reply without the number of its call: ``"value":...}`` or ``"error":...}``."""
    return reply.partition(b",")[2]


def _read_value(part: bytes) -> tuple[bool, Any]:
    return read_reply(b"{" + part, from_handle=_Opaque)


def _judge(
    problem: PlusProblem, inputs: Sequence[Any], reply: bytes, truth: bytes
) -> tuple[str, str] | None:
    """How a reply fails, or ``None``."""
    # Equal bytes are equal values. Some problems return megabytes for each of a thousand inputs:
    # decode only what may differ.
    if reply == truth and b'["h"' not in reply:
        return None
    expected = _read_value(truth)[1]
    ok, value = _read_value(reply)
    if not ok:
        return "runtime_error", str(value)
    try:
        if problem.match is not None:
            right = problem.match(inputs, value, expected)
        else:
            right = outputs_match(value, expected, atol=problem.atol)
    except (TypeError, ValueError, OverflowError, ZeroDivisionError, RecursionError):
        right = False  # a value of a shape the rule cannot take
    return None if right else ("wrong", f"expected {_short(expected)}, got {_short(value)}")


def _short(value: Any) -> str:
    # repr of a huge integer is refused by Python beyond 4300 digits.
    if isinstance(value, int) and abs(value) >= 1 << 256:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 120 else f"{text[:117]}..."


def _private_folder(folder: str) -> Path:
    path = Path(folder).expanduser()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise ValueError(
            f"cache_dir: {str(path)!r} must belong to you and be writable by nobody else: expected "
            "outputs decide what is right"
        )
    return path


def _read_expected(path: Path, count: int) -> _Expected | None:
    try:
        stored = json.loads(gzip.decompress(path.read_bytes()))
        replies = [text.encode() for text in stored["replies"]]
        seconds = [float(spent) for spent in stored["seconds"]]
    except FileNotFoundError:
        return None
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError):
        logger.warning("%s is damaged and is computed again", path)
        return None
    if not len(replies) == len(seconds) == count:
        return None
    return _Expected.of(replies, seconds)


def _write_expected(path: Path, replies: Sequence[bytes], seconds: Sequence[float]) -> None:
    body = json.dumps({"replies": [r.decode() for r in replies], "seconds": list(seconds)})
    temporary = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.tmp")
    temporary.write_bytes(gzip.compress(body.encode(), 1))
    temporary.replace(path)
