"""Splits, stable numbering and determinism of the generated tasks."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from lit_dlm import tasks, toy
from lit_dlm.tasks import Task
from lit_dlm.toy.addition import Addition
from lit_dlm.toy.countdown import Countdown, canonical, read_problems
from lit_dlm.toy.generated import Problem, is_held_out
from lit_dlm.toy.python_functions import PythonFunctions
from lit_dlm.toy.sudoku import Sudoku, read_puzzles
from lit_dlm.toy.word_problems import WordProblems

TASKS = [WordProblems, PythonFunctions, Sudoku, Countdown, Addition]


def test_one_key_in_ten_is_held_out() -> None:
    """2,000 keys: 200 expected, standard deviation 13."""
    assert abs(sum(is_held_out(f"key {n}") for n in range(2_000)) - 200) < 55


@pytest.mark.parametrize("task", TASKS)
def test_problem_i_does_not_depend_on_how_many_are_asked_for(task: type) -> None:
    few = task(split="test", num_examples=7).examples()
    many = task(split="test", num_examples=30).examples()
    assert list(many[:7]) == list(few)
    assert few[3].uid == f"{task.name}/test/00003"


@pytest.mark.parametrize("task", TASKS)
def test_other_seeds_and_splits_list_other_problems(task: type) -> None:
    texts = [
        {example.text for example in task(split=split, num_examples=40, seed=seed).examples()}
        for split, seed in (("test", 0), ("test", 1), ("train", 0))
    ]
    assert len(texts[0] & texts[1]) < 20
    assert not texts[0] & texts[2]
    assert not texts[1] & texts[2]


@pytest.mark.parametrize("task", [WordProblems, Addition, Sudoku, Countdown])
@pytest.mark.parametrize(
    "completion",
    ["#### " + "7" * 6_000, "(" * 100_000, "<answer>" * 20_000, "1" + "-" * 100_000 + "1"],
    ids=["digits", "parentheses", "tags", "signs"],
)
def test_no_completion_breaks_a_grader_or_keeps_it_for_minutes(task: type, completion: str) -> None:
    """Python converts at most 4300 digits; 100,000 times to the end of the text take minutes."""
    problems = task(split="test", num_examples=1)
    assert not problems.grade(problems.examples()[0], completion).is_correct


@pytest.mark.slow
@pytest.mark.parametrize("task", [WordProblems, PythonFunctions, Addition])
def test_the_500_listed_test_problems_are_never_drawn_in_training(task: type) -> None:
    rng = random.Random(0)
    held_out = {example.text for example in task("test", num_examples=500).examples()}
    source = task("train")
    problems = [source.draw_training(rng) for _ in range(3_000)]
    assert not any(is_held_out(problem.key) for problem in problems)
    assert not held_out & {problem.text for problem in problems}


def test_a_generator_that_runs_out_says_how_far_it_came() -> None:
    class Few(Addition):
        name = "few"

        def draw(self, rng: random.Random) -> Problem:
            key = str(rng.randrange(40))
            return Problem(key=key, text=key, reference={})

    available = sum(is_held_out(str(n)) for n in range(40))
    with pytest.raises(
        ValueError, match=f"few.num_examples: the test split ran out at {available} "
    ):
        Few("test", 40).examples()


def _rows(folder: Path, text: str, name: str) -> Path:
    (folder / name).write_text(text + "\n")
    return folder / name


REFUSED: dict[str, Callable[[Path], object]] = {
    r"addition\.split": lambda folder: Addition("dev"),
    r"sudoku\.split": lambda folder: Sudoku("dev"),
    r"sudoku\.path": lambda folder: Sudoku("train", str(folder / "a.csv")),
    r"countdown\.counts": lambda folder: Countdown(counts=(6,)),
    r"b\.jsonl: row 0: solution '44-15=29'": lambda folder: read_problems(
        _rows(folder, '{"input": "15,44,79,50", "output": "44-15=29"}', "b.jsonl")
    ),
    r"b\.jsonl: row 0: expected numbers": lambda folder: read_problems(
        _rows(folder, '{"input": "15-44", "output": "44"}', "b.jsonl")
    ),
    r"c\.csv: row 0: '1111111111111111' does not": lambda folder: read_puzzles(
        _rows(folder, f"Puzzle,Solution\n3102200002100320,{'1' * 16}", "c.csv")
    ),
    r"c\.csv: row 0: expected 16 digits": lambda folder: read_puzzles(
        _rows(folder, f"Puzzle,Solution\n310,{'1' * 16}", "c.csv")
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals_name_the_option_or_the_row(tmp_path: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REFUSED[message](tmp_path)


@pytest.mark.parametrize("task", TASKS)
def test_they_are_tasks(task: type) -> None:
    assert isinstance(task(), Task)


def test_canonical_ignores_the_order_of_the_numbers() -> None:
    assert canonical([44, 15, 79], 50) == canonical([79, 44, 15], 50) == "15,44,79=50"


def test_names_of_tasks_are_distinct():
    classes = [getattr(tasks, name) for name in tasks.__all__] + [
        getattr(toy, name) for name in toy.__all__
    ]
    names = [each.name for each in classes if hasattr(each, "name")]
    assert len(names) == len(set(names)) == 23
