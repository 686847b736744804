"""What all generated tasks share: splits, numbering, public problems, refusals."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lit_dlm import tasks, toy
from lit_dlm.tasks import Task
from lit_dlm.toy import (
    Addition,
    Countdown,
    PythonFunctions,
    Sudoku,
    WideFunctions,
    WordProblems,
)
from lit_dlm.toy.generated import Problem, is_held_out, shipped_digests, short_digest
from tests.tasks.rows import DATA, needs_data

TASKS = [WordProblems, PythonFunctions, WideFunctions, Sudoku, Countdown, Addition]


def test_one_key_in_ten_is_held_out() -> None:
    """2,000 keys: 200 expected, standard deviation 13."""
    assert abs(sum(is_held_out(f"key {n}") for n in range(2_000)) - 200) < 55


@pytest.mark.parametrize("task", TASKS)
def test_lists_begin_alike_and_differ_by_seed_and_split(task: type) -> None:
    few = task(split="test", num_examples=7).examples()
    many = task(split="test", num_examples=40).examples()
    assert list(many[:7]) == list(few)
    assert few[3].uid == f"{task.name}/test/00003"
    assert isinstance(task(), Task)
    other, train = (
        {example.text for example in task(split=split, num_examples=40, seed=seed).examples()}
        for split, seed in (("test", 1), ("train", 0))
    )
    texts = {example.text for example in many}
    assert len(texts & other) < 20
    assert not train & (texts | other)


ENDLESS = ("#### " + "7" * 6_000, "(" * 100_000, "<answer>" * 20_000, "1" + "-" * 100_000 + "1")


@pytest.mark.parametrize("task", [WordProblems, Addition, Sudoku, Countdown])
def test_reference_completions_grade_right_and_none_breaks_a_grader(task: type) -> None:
    """Python converts at most 4300 digits; 100,000 times to the end of the text take minutes."""
    made = task("test", num_examples=60)
    for example in made.examples():
        assert made.grade(example, made.reference_completion(example)).is_correct
    assert not any(made.grade(example, completion).is_correct for completion in ENDLESS)


@pytest.mark.slow
@pytest.mark.parametrize("task", [WordProblems, PythonFunctions, WideFunctions, Addition])
def test_the_500_listed_test_problems_are_never_drawn_in_training(task: type) -> None:
    rng = random.Random(0)
    held_out = {example.text for example in task("test", num_examples=500).examples()}
    assert not held_out & {task("train").draw_pair(rng)[0] for _ in range(2_000)}


def test_a_generator_that_runs_out_says_how_far_it_came() -> None:
    class Few(Addition):
        name = "few"

        def draw(self, rng: random.Random) -> Problem:
            key = str(rng.randrange(40))
            return Problem(key=key, text=key, reference={})

    available = sum(is_held_out(str(n)) for n in range(40))
    with pytest.raises(ValueError, match=rf"few\.num_examples: .* ran out at {available} "):
        Few("test", 40).examples()


class Strata(Addition):
    """Forty keys; those below 10 are of the stratum ``few``, a quarter of what is drawn."""

    name = "strata"
    strata = ("many", "few")

    def draw(self, rng: random.Random) -> Problem:
        key = rng.randrange(40)
        stratum = "few" if key < 10 else "many"
        return Problem(key=str(key), text=f"{stratum} {key}", reference={}, stratum=stratum)


def test_strata_take_turns_until_one_runs_out_which_is_named() -> None:
    few = sum(not is_held_out(str(n)) for n in range(10))
    listed = Strata("train", 2 * few + 1).examples()
    assert [one.text.split()[0] for one in listed] == [*(["many", "few"] * few), "many"]
    assert len({one.text for one in listed}) == len(listed)
    with pytest.raises(ValueError, match=rf" of 'few' ran out at {2 * few + 1} .* expected 40$"):
        Strata("train", 40).examples()


STEPS_CUT = '{"input": "15,44,79,50", "output": "44-15=29"}'


@pytest.mark.parametrize(
    ("task", "options", "text", "message"),
    [
        (Addition, {"split": "dev"}, "", r"addition\.split: .* got 'dev'"),
        (Sudoku, {"split": "train"}, "x", r"sudoku\.path: "),
        (Countdown, {"counts": (3, 6)}, "", r"countdown\.counts\[1\]: .* got 6"),
        (Countdown, {}, STEPS_CUT, r"line 1: .*'44-15=29 \("),
        (Countdown, {}, '{"input": "15-44", "output": "44"}', "line 1: expected numbers"),
        (Sudoku, {}, '{"input": "3102200002100320", "output": "1"}', "line 1: .*, got '1'"),
        (Sudoku, {}, '{"input": "310", "output": "1"}', "line 1: expected 16 digits"),
    ],
)
def test_refusals_name_the_option_or_the_row(tmp_path: Path, task, options, text, message) -> None:
    path = tmp_path / "b.jsonl"
    path.write_text(text)
    given = {"path": str(path)} if text else {}
    with pytest.raises(ValueError, match=message):
        task(**options, **given).examples()


def test_names_of_tasks_are_distinct_and_digest_files_hold_all_public_problems() -> None:
    """BLAKE2b with 6 bytes of ``15,44,79=50``, and of a puzzle's 16 digits."""
    found = [each for package in (tasks, toy) for each in vars(package).values()]
    names = [each.name for each in found if isinstance(each, type) and hasattr(each, "name")]
    assert len(names) == len(set(names)) > 20
    assert short_digest("15,44,79=50") in shipped_digests("countdown")
    assert short_digest("3102200002100320") in shipped_digests("sudoku")
    assert [len(shipped_digests(task)) for task in ("countdown", "sudoku")] == [3_248, 1_472]


def test_training_never_draws_a_public_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puzzles drawn before are not drawn again from the same seeds once they are public."""

    def drawn() -> set[str]:
        pairs = [Sudoku("train").draw_pair(random.Random(seed)) for seed in range(30)]
        return {text.replace("\n", "") for text, _ in pairs}

    public = drawn()
    digests = frozenset(map(short_digest, public))
    monkeypatch.setattr("lit_dlm.toy.generated.shipped_digests", lambda task: digests)
    assert not public & drawn()


def _key(puzzle: str = "", numbers: Sequence[int] = (), target: int = 0, **_solution: Any) -> str:
    return puzzle or f"{','.join(map(str, sorted(numbers)))}={target}"


@needs_data
@pytest.mark.parametrize(
    ("task", "pattern", "files", "rows"),
    [(Sudoku, "*sudoku*", 10, 1_472), (Countdown, "*cd?_test.jsonl", 4, 3_256)],
)
def test_every_public_problem_is_covered_and_graded_and_never_drawn(
    task: type, pattern: str, files: int, rows: int
) -> None:
    """Eight rows of Countdown repeat another one in a different order; d1 gives no solution."""
    read = [task("test", str(path)) for path in (DATA / "planning").glob(pattern)]
    assert len(read) == files
    keys = [_key(**example.reference) for one in read for example in one.examples()]
    assert len(keys) == rows
    assert {short_digest(key) for key in keys} == shipped_digests(task.name)
    for one in read:
        for example in filter(lambda each: each.reference["solution"], one.examples()[:40]):
            assert one.grade(example, one.reference_completion(example)).is_correct
    texts = {example.text for one in read for example in one.examples()}
    source, rng = task("train"), random.Random(0)
    assert not texts & {source.draw_pair(rng)[0] for _ in range(3_000)}
