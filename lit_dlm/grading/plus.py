"""Grading by inputs and a reference solution: the tests of HumanEval+ and MBPP+ (arXiv 2305.01210).

Both run in the sandbox. Expected values are computed when a problem is first graded, and kept.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lit_dlm.grading.child import wire
from lit_dlm.grading.sandbox import SandboxLimits, require_permission, run_job
from lit_dlm.grading.verdict import Verdict

logger = logging.getLogger(__name__)

Rule = Literal["close", "same_set", "found_alike", "either", "root", "anything"]

# EvalPlus 0.3.1: each call may take 1 s or 4 times the reference, all calls together 60 s.
_LEAST_SECONDS = 1.0
_REFERENCE_FACTOR = 4.0
_MOST_SECONDS = 60.0
# Here all calls together may always take twice as long as the reference, which may take a minute.
_RUN_FACTOR = 2.0
_REFERENCE_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class PlusProblem:
    """One problem with its inputs: argument lists of the original and of the added tests."""

    name: str
    entry_point: str
    reference_code: str  # a module whose entry_point is right by definition
    base_inputs: Sequence[Sequence[Any]]
    plus_inputs: Sequence[Sequence[Any]]
    atol: float = 0.0
    rule: Rule = "close"  # how outputs are compared, see .child.compare.RULES
    alternative: Callable[..., Any] | None = None  # for the rule either: another right output


class PlusGrader:
    """Grades candidates by reference solutions; ``limits`` apply to a run over all inputs."""

    def __init__(self, *, limits: SandboxLimits | None = None, allow_code_execution: bool) -> None:
        self._limits = limits or SandboxLimits(
            wall_seconds=_MOST_SECONDS + 1,
            cpu_seconds=_MOST_SECONDS + 1,
            memory_bytes=4 << 30,
            value_bytes=1 << 28,  # Mbpp/255 returns lists of millions of tuples
        )
        self._allow = allow_code_execution
        # Of a reference: ``truths``, what it returned, "" if it is too large to send, and seconds
        # ``taken``.
        self._expected: dict[str, dict[str, Any]] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def grade(self, code: str, problem: PlusProblem) -> Verdict:
        """Returns the share of right outputs as score; inputs not run after a failure are wrong."""
        require_permission(self._allow)
        # Most wrong candidates fail the few original inputs, which saves running thousands.
        parts = (("base", problem.base_inputs), ("plus", problem.plus_inputs))
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
        # Truths go with the job to the driver alone; the worker gets one argument list at a time.
        kept = [index for index, truth in enumerate(expected["truths"]) if truth]
        spent = [expected["taken"][index] for index in kept]
        seconds = max(self._limits.wall_seconds, _RUN_FACTOR * sum(spent))
        other = problem.alternative
        job = {
            "mode": "compare",
            "code": code,
            "entry_point": problem.entry_point,
            "calls": [wire.encode(tuple(inputs[index])) for index in kept],
            "call_seconds": [max(_LEAST_SECONDS, _REFERENCE_FACTOR * s) for s in spent],
            "truths": [expected["truths"][index] for index in kept],
            "rule": problem.rule,
            "atol": problem.atol,
            "alternatives": [other and wire.encode(other(*inputs[index])) for index in kept],
        }
        head = run_job(job, replace(self._limits, wall_seconds=seconds, cpu_seconds=seconds))
        detail, failed = head["detail"], head.get("failed")
        if failed is not None:
            detail = f"{part} input {kept[failed]}: {detail}"
        verdict = Verdict(status=head["status"], answer=code, detail=detail)
        return verdict, head.get("passed", 0) + len(inputs) - len(kept)

    def _expected_of(
        self, problem: PlusProblem, part: str, inputs: Sequence[Sequence[Any]]
    ) -> dict[str, Any]:
        key = f"{problem.name}/{part}/{problem.entry_point}"
        # Threads that grade other problems do not wait for this reference.
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._expected:
                self._expected[key] = self._computed(problem, inputs)
            return self._expected[key]

    def _computed(self, problem: PlusProblem, inputs: Sequence[Sequence[Any]]) -> dict[str, Any]:
        job = {
            "mode": "record",
            "code": problem.reference_code,
            "entry_point": problem.entry_point,
            "calls": [wire.encode(tuple(args)) for args in inputs],
        }
        # The reference is trusted and must finish, even on a busy machine.
        limits = replace(
            self._limits, wall_seconds=_REFERENCE_SECONDS, cpu_seconds=_REFERENCE_SECONDS
        )
        head = run_job(job, limits)
        if head["status"] != "right":
            raise ValueError(f"{problem.name}: the reference solution failed: {head['detail']}")
        # EvalPlus compares these too, in one process. They are 1 input of 41,015 in MBPP+.
        if num_left_out := head["truths"].count(""):
            logger.info("%s: %d outputs are too large and left out", problem.name, num_left_out)
        return head
