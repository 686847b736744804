"""The comparing processes: limits, restarts, threads."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from lit_dlm.grading.answers import grade_math
from lit_dlm.grading.math_equality import MathEquality

# Comparisons run in processes of their own.
pytestmark = pytest.mark.slow


@pytest.fixture
def equality():
    pool = MathEquality(seconds=60.0)
    yield pool
    pool.close()


def test_a_hanging_comparison_is_ended_and_the_next_one_works(equality):
    r"""10^(10^10) keeps sympy busy far beyond the limit; ``1=1`` after it needs a new process."""
    assert equality.equal("1", "1") is True
    equality.seconds = 1.0
    started = time.monotonic()
    assert equality.equal("5", "10^{10^{10}}") is not True
    assert equality.equal("1", "9^{9^{9^{9}}} + 1") is not True
    assert time.monotonic() - started < 100
    equality.seconds = 60.0
    assert equality.equal("x", "x") is True


def test_a_comparison_without_end_is_no_right_answer():
    class Stuck:
        def equal(self, gold, answer):
            return None

    verdict = grade_math(r"\boxed{2}", "3", equality=Stuck())
    assert (verdict.status, verdict.detail) == ("timeout", "the comparison did not end")


def test_threads_share_the_pool(equality):
    questions = [(str(n), str(n + n % 2)) for n in range(8)]
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(lambda pair: equality.equal(*pair), questions))
    assert answers == [True, False] * 4
    assert len(equality._idle) <= 2


def test_closing_ends_the_processes(equality):
    equality.equal("1", "1")
    processes = [p._process for p in equality._idle]
    equality.close()
    assert all(p.poll() is not None for p in processes)


def test_a_limit_must_be_positive():
    with pytest.raises(ValueError, match="seconds must be positive, got 0"):
        MathEquality(seconds=0)
