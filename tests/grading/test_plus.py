"""Grading against a reference solution on inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lit_dlm.grading import SandboxLimits
from lit_dlm.grading.plus import PlusGrader, PlusProblem

# Graded code runs in processes of its own.
pytestmark = pytest.mark.slow

HALVES = PlusProblem(
    name="Test/0",
    entry_point="f",
    reference_code="def f(x):\n    return x / 2",
    base_inputs=[[1], [2]],
    plus_inputs=[[-3], [7], [0]],
)


@pytest.fixture
def grader():
    limits = SandboxLimits(wall_seconds=60, cpu_seconds=60)
    return PlusGrader(limits=limits, allow_code_execution=True)


def test_right_code_passes_base_and_plus(grader):
    verdict = grader.grade("def f(x):\n    return 0.5 * x + 1e-9", HALVES)
    assert (verdict.status, verdict.score) == ("right", 1.0)


def test_score_counts_matching_inputs_and_detail_names_the_first_miss(grader):
    """Right for -3 only among the added inputs: (2 base + 1 plus) of 5 inputs."""
    code = "def f(x):\n    return x / 2 if x < 3 and x else 9.0"
    verdict = grader.grade(code, HALVES)
    assert (verdict.status, verdict.detail) == ("wrong", "plus input 1: expected 3.5, got 9.0")
    assert verdict.score == pytest.approx(3 / 5)


def test_failing_the_base_inputs_spares_the_others(grader):
    verdict = grader.grade("def f(x):\n    return x if x == 1 else 1.0", HALVES)
    assert verdict.detail == "base input 0: expected 0.5, got 1"
    assert verdict.score == pytest.approx(1 / 5)
    assert set(grader._expected) == {"Test/0/base/f"}


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("def f(x):\n    raise ValueError", "runtime_error"),
        ("def f(x):\n    while True: pass", "timeout"),
        ("import os\ndef f(x):\n    os._exit(0)", "runtime_error"),
        ("class Y:\n    def __eq__(s, o): return True\ndef f(x):\n    return Y()", "wrong"),
        ("def g(x): pass", "runtime_error"),
        ("def f(x", "syntax_error"),
    ],
)
def test_failures_are_never_right(grader, code, status):
    verdict = grader.grade(code, HALVES)
    assert (verdict.status, verdict.score) == (status, 0.0)


def test_a_rule_replaces_the_comparison(grader):
    problem = replace(HALVES, rule="either", alternative=lambda x: -x, atol=0.1)
    assert grader.grade("def f(x):\n    return -x - 0.05", problem).is_correct
    verdict = grader.grade("def f(x):\n    return 'text'", problem)
    assert (verdict.status, verdict.score) == ("wrong", 0.0)


def test_sets_match_in_any_order(grader):
    problem = replace(
        HALVES,
        reference_code="def f(x):\n    return {str(i) for i in range(20)}",
        plus_inputs=[],
    )
    code = "def f(x):\n    return {str(i) for i in reversed(range(20))}"
    assert grader.grade(code, problem).is_correct


def test_opaque_results_are_equal_to_nothing(grader):
    problem = replace(HALVES, reference_code="def f(x):\n    return object()", plus_inputs=[])
    verdict = grader.grade("def f(x):\n    return object()", problem)
    assert verdict.status == "wrong"


def test_a_failing_reference_is_an_error(grader):
    with pytest.raises(ValueError, match="Test/0: the reference solution failed: input 1: Zero"):
        grader.grade(
            "def f(x): pass",
            replace(HALVES, reference_code="def f(x):\n    return 1 / (x - 2)"),
        )


def test_outputs_that_are_too_large_are_left_out():
    """Input 1 gives 4 MB, more than the limit; of 5 inputs 2 are wrong, and 1 is not looked at."""
    limits = SandboxLimits(wall_seconds=60, cpu_seconds=60, value_bytes=1 << 20)
    grader = PlusGrader(limits=limits, allow_code_execution=True)
    reference = "def f(x):\n    return 'x' * 4_000_000 if x == 7 else x / 2"
    problem = replace(HALVES, reference_code=reference)
    verdict = grader.grade("def f(x):\n    return x / 2 if x > 0 else 1", problem)
    assert (verdict.detail, verdict.score) == ("plus input 0: expected -1.5, got 1", 3 / 5)


def test_a_forged_message_of_20_mb_leaves_one_line(grader):
    code = (
        "import os, struct\ndef f(x):\n"
        '    body = b\'{"id":2,"error":["E","\' + b\'x\' * (20 << 20) + b\'"]}\'\n'
        "    for fd in range(3, 64):\n        try:\n"
        "            message = memoryview(struct.pack('>I', len(body)) + body)\n"
        "            while message: message = message[os.write(fd, message):]\n"
        "        except OSError: pass\n    return 1"
    )
    verdict = grader.grade(code, HALVES)
    assert (verdict.status, verdict.score) == ("runtime_error", 0.0)
    assert verdict.detail.startswith("base input 0: E: xxx")
    assert len(verdict.detail) < 600
