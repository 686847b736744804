"""4x4 Sudoku: grids, puzzles, extraction and grading."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from lit_dlm.tasks.base import PromptExample
from lit_dlm.toy.sudoku import Sudoku, agrees, as_rows, complete_grids, is_complete

PUZZLE = "3102200002100320"
SOLUTION = "3142243142131324"  # first row of d1's test file, Apache-2.0
REFERENCE = {"puzzle": PUZZLE, "solution": SOLUTION}
EXAMPLE = PromptExample(uid="u", task="sudoku", text=as_rows(PUZZLE), reference=REFERENCE)


def test_288_grids_are_complete_and_repeat_no_digit_in_a_row_column_or_box() -> None:
    grids = complete_grids()
    assert len(grids) == len(set(grids)) == 288
    assert all(map(is_complete, (*grids, SOLUTION)))
    assert not is_complete("1234341221433421"[::-1].replace("1", "2"))
    assert not is_complete("1234" * 4)  # rows right, columns wrong
    assert not is_complete("1234234134124123")  # rows and columns right, boxes wrong
    assert not is_complete(SOLUTION[:-1])


def test_puzzles_are_grids_with_4_to_12_blanks() -> None:
    rng = random.Random(0)
    for _ in range(100):
        reference = Sudoku().draw(rng).reference
        assert is_complete(reference["solution"])
        assert agrees(reference["solution"], reference["puzzle"])
        assert 4 <= reference["puzzle"].count("0") <= 12


@pytest.mark.parametrize(
    ("completion", "status"),
    [
        (as_rows(SOLUTION), "right"),
        (SOLUTION, "right"),
        (f"thinking 1234\n</reasoning>\n<answer>\n{SOLUTION}\n</answer>", "right"),
        ("3 1 4 2\n2 4 3 1\n4 2 1 3\n1 3 2 4", "right"),
        ("|3|1|4|2|\n|2|4|3|1|\n|---+---|\n|4|2|1|3|\n|1|3|2|4|", "right"),
        (f"{as_rows('1' * 16)}\n\nNo:\n{as_rows(SOLUTION)}", "right"),
        (f"<answer>{SOLUTION}</answer> not <answer>{PUZZLE}</answer>", "wrong"),
        (as_rows(PUZZLE), "wrong"),
        (as_rows("1342243142131324"), "wrong"),
        (SOLUTION + "1", "no_answer"),
        (SOLUTION[:-1], "no_answer"),
        ("no idea", "no_answer"),
    ],
)
def test_grades(completion: str, status: str) -> None:
    assert Sudoku().grade(EXAMPLE, completion).status == status


def test_any_valid_grid_is_right_and_the_score_is_the_share_of_blanks_filled_as_listed() -> None:
    """Eight blanks; swapping two neighbouring filled blanks leaves six of eight."""
    first, second = [grid for grid in complete_grids() if grid[0] == "1"][:2]
    example = replace(EXAMPLE, reference={"puzzle": "1" + "0" * 15, "solution": first})
    assert Sudoku().grade(example, as_rows(second)).is_correct
    assert (PUZZLE.count("0"), PUZZLE[5:7]) == (8, "00")
    verdict = Sudoku().grade(EXAMPLE, SOLUTION[:5] + SOLUTION[6] + SOLUTION[5] + SOLUTION[7:])
    assert (verdict.status, verdict.score) == ("wrong", pytest.approx(6 / 8))


def test_files_of_both_formats_are_read(tmp_path: Path) -> None:
    csv, jsonl = tmp_path / "a.csv", tmp_path / "b.jsonl"
    csv.write_text(f"Puzzle,Solution\n{PUZZLE},{SOLUTION}\n")
    jsonl.write_text(json.dumps({"input": as_rows(PUZZLE), "output": as_rows(SOLUTION)}) + "\n")
    for path in (csv, jsonl):
        (example,) = Sudoku("test", str(path)).examples()
        assert (example.text, example.reference) == (EXAMPLE.text, EXAMPLE.reference)
        assert example.uid == f"sudoku/test/{path.stem}-00000"
