"""4x4 Sudoku: the public test puzzles, and training puzzles made from the 288 complete grids.

A puzzle is four rows of four digits with 0 for a blank; a completion repeats the grid with the
blanks filled. Any valid grid that keeps the givens is right. Public puzzles are those of d1 (500)
and Dream (nine files of 108).
"""

from __future__ import annotations

import itertools
import random
import re
from functools import cache
from typing import Any

from lit_dlm.grading import Verdict
from lit_dlm.tasks.base import PromptExample
from lit_dlm.tasks.sources import Row
from lit_dlm.toy.generated import Problem, PuzzleTask, tagged_answer

CELLS = 16
MIN_BLANKS, MAX_BLANKS = 4, 12  # blanks of generated puzzles: the public files have 4 to 12

_UNITS = (
    *(range(4), range(4, 8), range(8, 12), range(12, 16)),
    *(range(0, CELLS, 4), range(1, CELLS, 4), range(2, CELLS, 4), range(3, CELLS, 4)),
    *((0, 1, 4, 5), (2, 3, 6, 7), (8, 9, 12, 13), (10, 11, 14, 15)),
)
"""Cells of rows, columns and boxes."""
_GRID_RUN = re.compile(r"\d[\d\s|,+-]*")
_GRID = re.compile(r"^(?:[0-4]{16}|[0-4]{4}(?:\n[0-4]{4}){3})$", re.MULTILINE)


@cache
def complete_grids() -> tuple[str, ...]:
    """Returns the 288 complete 4x4 grids as strings of 16 digits, in increasing order."""
    rows = ["".join(digits) for digits in itertools.permutations("1234")]
    # Two rows whose boxes are whole; of 24**4 grids only these 96**2 are left to look at.
    halves = [
        first + second
        for first, second in itertools.product(rows, repeat=2)
        if all(len({*first[c : c + 2], *second[c : c + 2]}) == 4 for c in (0, 2))
    ]
    grids = map("".join, itertools.product(halves, repeat=2))
    return tuple(grid for grid in grids if is_complete(grid))


def is_complete(grid: str) -> bool:
    """Whether digits in reading order are a grid whose rows, columns and boxes hold 1 to 4 once."""
    return len(grid) == CELLS and all({grid[i] for i in unit} == set("1234") for unit in _UNITS)


def agrees(grid: str, puzzle: str) -> bool:
    """Whether a grid of 16 digits keeps the givens of a puzzle, where 0 is a blank."""
    return all(given in ("0", cell) for given, cell in zip(puzzle, grid, strict=True))


def as_rows(grid: str) -> str:
    """Writes 16 digits as four lines."""
    return "\n".join(grid[i : i + 4] for i in range(0, CELLS, 4))


def _problem(puzzle: str, solution: str) -> Problem:
    reference = {"puzzle": puzzle, "solution": solution}
    return Problem(key=puzzle, text=as_rows(puzzle), reference=reference)


class Sudoku(PuzzleTask):
    """4x4 Sudoku puzzles from a file or generated, see the module."""

    name = "sudoku"

    def draw(self, rng: random.Random) -> Problem:
        solution = rng.choice(complete_grids())
        blanks = set(rng.sample(range(CELLS), rng.randint(MIN_BLANKS, MAX_BLANKS)))
        puzzle = "".join("0" if i in blanks else digit for i, digit in enumerate(solution))
        return _problem(puzzle, solution)

    def read(self, row: Row) -> Problem:
        """Reads ``Puzzle`` and ``Solution`` (d1), or ``input`` and ``output`` (Dream)."""
        names = ("Puzzle", "Solution") if "Puzzle" in row.fields else ("input", "output")
        puzzle, solution = (re.sub(r"\s", "", str(row.fields.get(name))) for name in names)
        is_puzzle = re.fullmatch(r"[0-4]{16}", puzzle) is not None
        row.expect(is_puzzle, "16 digits 0 to 4", puzzle)
        solves = is_complete(solution) and agrees(solution, puzzle)
        row.expect(solves, f"a solution of {puzzle}", solution)
        return _problem(puzzle, solution)

    def write_answer(self, reference: dict[str, Any], rng: random.Random) -> str:
        return as_rows(reference["solution"])

    def extract(self, example: PromptExample, completion: str) -> str | None:
        """Returns the last grid, as 16 digits, in the last ``<answer>`` tags if there are any."""
        grids = []
        # Lines, bars and spaces are layout; words end a grid, whose digits must be all of a run.
        for run in _GRID_RUN.findall(tagged_answer(completion)):
            lines = filter(None, (re.sub(r"\D", "", line) for line in run.splitlines()))
            grids += _GRID.findall("\n".join(lines))
        return grids[-1].replace("\n", "") if grids else None

    def grade(self, example: PromptExample, completion: str) -> Verdict:
        """Accepts any valid grid; others score the share of blanks filled as in the solution."""
        puzzle, solution = example.reference["puzzle"], example.reference["solution"]
        grid = self.extract(example, completion)
        if grid is None:
            return Verdict(status="no_answer", detail="no grid of 16 digits", score=0.0)
        # With many blanks a puzzle has several solutions, and nobody says which is meant.
        if is_complete(grid) and agrees(grid, puzzle):
            return Verdict(status="right", answer=grid)
        blanks = [i for i in range(CELLS) if puzzle[i] == "0"]
        score = sum(grid[i] == solution[i] for i in blanks) / max(len(blanks), 1)
        reason = "a given cell was changed" if not agrees(grid, puzzle) else "a digit repeats"
        # Below 1 whatever else is wrong: a grid with a changed given may have all blanks right.
        return Verdict(status="wrong", answer=grid, detail=reason, score=min(score, 0.99))
