"""The shipped digests cover every public test problem, and training never meets one."""

import random
from pathlib import Path

import pytest

from lit_dlm.toy.countdown import Countdown, canonical, read_problems
from lit_dlm.toy.puzzles import shipped_digests, short_digest
from lit_dlm.toy.sudoku import Sudoku, read_puzzles

PLANNING = Path(__file__).parents[2].parent / "shared" / "data" / "planning"
needs_files = pytest.mark.skipif(
    not PLANNING.is_dir(), reason="the public planning files are not on this machine"
)


def test_short_digest_is_stable() -> None:
    """Shipped files depend on this value: BLAKE2b with 6 bytes of ``15,44,79=50``."""
    assert short_digest("15,44,79=50") in shipped_digests("countdown")
    assert short_digest("3102200002100320") in shipped_digests("sudoku")


def test_digest_files_hold_all_public_problems() -> None:
    for task, count in (("sudoku", 1_472), ("countdown", 3_248)):
        assert len(shipped_digests(task)) == count


@needs_files
def test_every_public_problem_is_covered_and_never_drawn() -> None:
    """3,256 rows of Countdown, of which eight repeat another one in a different order."""
    rng = random.Random(0)
    puzzles = {p for path in PLANNING.glob("*sudoku*") for p, _ in read_puzzles(path)}
    assert len(puzzles) == 500 + 9 * 108
    assert {short_digest(p) for p in puzzles} == shipped_digests("sudoku")
    sudoku = Sudoku("train")
    assert not puzzles & {sudoku.draw_pair(rng)[0].replace("\n", "") for _ in range(3_000)}
    problems = [
        canonical(numbers, target)
        for path in PLANNING.glob("*cd[345]_test.jsonl")
        for numbers, target, _ in read_problems(path)
    ]
    assert len(problems) == 3_256
    assert {short_digest(p) for p in problems} == shipped_digests("countdown")
    countdown = Countdown("train", counts=(3,))
    for _ in range(3_000):
        *numbers, target = map(int, countdown.draw_pair(rng)[0].split(","))
        assert canonical(numbers, target) not in problems


@needs_files
def test_listed_solutions_of_the_public_files_grade_right() -> None:
    tasks = [Sudoku("test", str(path)) for path in PLANNING.glob("*sudoku*")]
    tasks += [Countdown("test", str(path)) for path in PLANNING.glob("*cd?_test.jsonl")]  # type: ignore[misc]
    assert len(tasks) == 14
    for task in tasks:
        for example in task.examples()[:40]:
            assert task.grade(example, task.reference_completion(example)).is_correct
