"""The answering processes: limits, restarts, threads."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lit_dlm.grading import answers
from lit_dlm.grading.answers import grade_math
from lit_dlm.grading.bounded import BoundedProcesses

# They run in processes of their own.
pytestmark = pytest.mark.slow


@pytest.fixture
def processes() -> Iterator[BoundedProcesses]:
    pool = BoundedProcesses("math")
    yield pool
    pool.close()


def test_a_hanging_comparison_is_ended_and_the_next_one_works(processes: BoundedProcesses) -> None:
    r"""10^(10^10) keeps sympy busy far beyond the limit; ``x=x`` after it needs a new process."""
    assert processes.ask({"gold": "1", "answer": "1"}, seconds=60.0) is True
    assert processes.ask({"gold": "1", "answer": "10^{10^{10}}"}, seconds=0.5) is not True
    assert processes.ask({"gold": "x", "answer": "x"}, seconds=60.0) is True


def test_a_comparison_without_end_is_no_right_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MATH_SECONDS", 0.0)
    verdict = grade_math(r"\boxed{9^{9^{9^{9}}} + 1}", "3")
    assert (verdict.status, verdict.detail) == ("timeout", "the comparison did not end")


def test_threads_share_the_pool(processes: BoundedProcesses) -> None:
    questions = [{"gold": str(n), "answer": str(n + n % 2)} for n in range(8)]
    with ThreadPoolExecutor(2) as threads:
        equal = list(threads.map(lambda question: processes.ask(question, seconds=60.0), questions))
    assert equal == [True, False] * 4


OWNER = """
from lit_dlm.grading.bounded import BoundedProcesses
pool, math = BoundedProcesses('extraction'), BoundedProcesses('math')
pool.ask({'completion': 'x = 1'}, seconds=60)
math.ask({'gold': '1', 'answer': '1'}, seconds=60)
print('ready', flush=True)
while True: math.ask({'gold': '1', 'answer': '9^{9^{9^{9}}}'}, seconds=0.5)
"""


def test_an_idle_process_ends_with_its_owner_and_a_busy_one_at_its_alarm() -> None:
    """Killed while one compares without end (alarm at 0.5 + 1 s) and one waits."""
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE) as owner:
        assert owner.stdout.readline() == b"ready\n"
        children = Path(f"/proc/{owner.pid}/task/{owner.pid}/children").read_text().split()
        owner.kill()
    assert len(children) == 2
    deadline = time.monotonic() + 60
    while (left := [*filter(_is_answering, children)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


def _is_answering(pid: str) -> bool:
    try:
        return b"bounded" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_they_see_nothing_of_the_environment_and_end_with_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LIT_DLM_TOKEN", "secret")
    before = _children()
    pool = BoundedProcesses("extraction")
    found = pool.ask({"completion": "x = 1"}, seconds=60.0)
    assert found == {"code": "x = 1", "reason": "", "is_syntax_error": False}
    (process,) = _children() - before
    assert b"LIT_DLM_TOKEN" not in Path(f"/proc/{process}/environ").read_bytes()
    pool.close()
    assert _children() <= before


def _children() -> set[str]:
    tasks = Path(f"/proc/{os.getpid()}/task").iterdir()
    return {pid for task in tasks for pid in (task / "children").read_text().split()}
