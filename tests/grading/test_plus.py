"""Grading against a reference solution on inputs."""

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
    return _grader()


def _grader(**limits):
    limits = SandboxLimits(wall_seconds=60, cpu_seconds=60, **limits)
    return PlusGrader(limits=limits, allow_code_execution=True)


def returns(text):
    return f"def f(x):\n    return {text}"


TWENTY = replace(HALVES, reference_code=returns("{str(i) for i in range(20)}"), plus_inputs=[])
OPAQUE = replace(HALVES, reference_code=returns("object()"), plus_inputs=[])
EITHER = replace(HALVES, rule="either", alternative=lambda x: -x, atol=0.1)
# A second of these would be an error: what fails the base inputs is spared the others.
BASE_ONLY = replace(HALVES, reference_code=returns("x / 2 if x in (1, 2) else 1 / 0"))
NINE, ONE = "input 1: expected 3.5, got 9.0", "input 0: expected 0.5, got 1"
EQUAL = "class Y:\n    def __eq__(s, o): return True\n"


@pytest.mark.parametrize(
    ("problem", "code", "status", "score", "detail"),
    [
        (HALVES, returns("0.5 * x + 1e-9"), "right", 1.0, ""),
        # Right for -3 only among the added inputs: (2 base + 1 plus) of 5 inputs.
        (HALVES, returns("x / 2 if x < 3 and x else 9.0"), "wrong", 3 / 5, f"plus {NINE}"),
        (BASE_ONLY, returns("x if x == 1 else 1.0"), "wrong", 1 / 5, f"base {ONE}"),
        (HALVES, "def f(x): raise ValueError", "runtime_error", 0.0, "base input 0: ValueError: "),
        (HALVES, "def f(x):\n    while True: pass", "timeout", 0.0, None),
        (HALVES, f"import os\n{returns('os._exit(0)')}", "runtime_error", 0.0, None),
        (HALVES, EQUAL + returns("Y()"), "wrong", 0.0, None),
        (HALVES, "def g(x): pass", "runtime_error", 0.0, None),
        (HALVES, "def f(x", "syntax_error", 0.0, None),
        (EITHER, returns("-x - 0.05"), "right", 1.0, ""),
        (EITHER, returns("'text'"), "wrong", 0.0, None),
        (TWENTY, returns("{str(i) for i in reversed(range(20))}"), "right", 1.0, ""),
        (OPAQUE, returns("object()"), "wrong", 0.0, None),
    ],
)
def test_verdicts_count_matching_inputs_and_name_the_first_miss(
    grader, problem, code, status, score, detail
):
    verdict = grader.grade(code, problem)
    assert (verdict.status, verdict.score) == (status, pytest.approx(score))
    assert detail in (None, verdict.detail)


def test_a_failing_reference_is_an_error(grader):
    with pytest.raises(ValueError, match="Test/0: the reference solution failed: input 1: Zero"):
        grader.grade("def f(x): pass", replace(HALVES, reference_code=returns("1 / (x - 2)")))


def test_outputs_that_are_too_large_are_left_out():
    """Input 1 gives 4 MB, more than the limit; of 5 inputs 2 are wrong, and 1 is not looked at."""
    grader = _grader(value_bytes=1 << 20)
    reference = returns("'x' * 4_000_000 if x == 7 else x / 2")
    problem = replace(HALVES, reference_code=reference)
    verdict = grader.grade(returns("x / 2 if x > 0 else 1"), problem)
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
    assert grader.grade(returns("x / 2"), HALVES).is_correct  # the truths are kept
