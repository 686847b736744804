"""4x4 Sudoku: the public test puzzles, and training puzzles made from the 288 complete grids.

A puzzle is four rows of four digits with 0 for a blank; a completion repeats the grid with the
blanks filled. Any valid grid that keeps the givens is right. Public puzzles are those of d1 (500)
and Dream (nine files of 108).
"""

from __future__ import annotations

import csv
import itertools
import json
import random
import re
from functools import lru_cache
from pathlib import Path

from lit_dlm.grading import Verdict
from lit_dlm.tasks.base import PromptExample
from lit_dlm.toy.generated import Problem
from lit_dlm.toy.puzzles import PuzzleTask

CELLS = 16
MIN_BLANKS, MAX_BLANKS = 4, 12
"""Blanks of generated puzzles: the public files have 4 to 12."""

_BOXES = [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
_UNITS = (
    [list(range(4 * r, 4 * r + 4)) for r in range(4)]
    + [list(range(c, CELLS, 4)) for c in range(4)]
    + _BOXES
)
_TAGGED = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.DOTALL)
_GRID_RUN = re.compile(r"\d[\d\s|,+-]*")


@lru_cache(maxsize=1)
def complete_grids() -> tuple[str, ...]:
    """The 288 complete 4x4 grids as strings of 16 digits, in increasing order."""
    rows = ["".join(p) for p in itertools.permutations("1234")]
    grids: list[str] = []
    for top in itertools.product(rows, repeat=2):
        if not _boxes_differ(*top):
            continue
        grids += [
            "".join(top + bottom)
            for bottom in itertools.product(rows, repeat=2)
            if _boxes_differ(*bottom) and is_complete("".join(top + bottom))
        ]
    return tuple(sorted(grids))


def _boxes_differ(first: str, second: str) -> bool:
    """Whether two stacked rows repeat no digit inside a box."""
    return all(len(set(first[c : c + 2] + second[c : c + 2])) == 4 for c in (0, 2))


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
    return Problem(
        key=puzzle, text=as_rows(puzzle), reference={"puzzle": puzzle, "solution": solution}
    )


def read_puzzles(path: str | Path) -> list[tuple[str, str]]:
    """Puzzles and solutions, 16 digits each, of a file.

    That is a CSV with the columns ``Puzzle`` and ``Solution`` (d1) or a JSON-lines file with
    ``input`` and ``output`` (Dream).
    """
    path = Path(path)
    with path.open(encoding="utf-8", newline="") as lines:
        if path.suffix == ".csv":
            rows = [(row.get("Puzzle"), row.get("Solution")) for row in csv.DictReader(lines)]
        else:
            records = [json.loads(line) for line in lines if line.strip()]
            rows = [(record.get("input"), record.get("output")) for record in records]
    pairs = []
    for number, (puzzle, solution) in enumerate(rows):
        first, second = (re.sub(r"\s", "", str(text)) for text in (puzzle, solution))
        if not re.fullmatch(r"[0-4]{16}", first):
            raise ValueError(f"{path}: row {number}: expected 16 digits 0 to 4, got {puzzle!r}")
        if not is_complete(second) or not agrees(second, first):
            raise ValueError(f"{path}: row {number}: {solution!r} does not solve {puzzle!r}")
        pairs.append((first, second))
    return pairs


class Sudoku(PuzzleTask):
    """4x4 Sudoku puzzles from a file or generated, see the module."""

    name = "sudoku"

    def draw(self, rng: random.Random) -> Problem:
        solution = rng.choice(complete_grids())
        blanks = set(rng.sample(range(CELLS), rng.randint(MIN_BLANKS, MAX_BLANKS)))
        puzzle = "".join("0" if i in blanks else digit for i, digit in enumerate(solution))
        return _problem(puzzle, solution)

    def read(self, path: str | Path) -> list[Problem]:
        return [_problem(puzzle, solution) for puzzle, solution in read_puzzles(path)]

    def draw_pair(self, rng: random.Random) -> tuple[str, str]:
        problem = self.draw_training(rng)
        return problem.text, as_rows(problem.reference["solution"])

    def reference_completion(self, example: PromptExample) -> str:
        return as_rows(example.reference["solution"])

    def extract(self, example: PromptExample, completion: str) -> str | None:
        """The last grid, inside the last ``<answer>`` tags when there are any.

        It is 16 digits 0 to 4 on one line, or four lines of four; spaces, commas and the signs that
        draw boxes (bars, pluses, dashes) are ignored between them.
        """
        tagged = _TAGGED.findall(completion)
        grids = []
        for run in _GRID_RUN.findall(tagged[-1] if tagged else completion):
            grids += _grids_of_run(run)
        return grids[-1] if grids else None

    def grade(self, example: PromptExample, completion: str) -> Verdict:
        """Any right grid is right; the score is the share of blanks filled as listed."""
        puzzle, solution = example.reference["puzzle"], example.reference["solution"]
        grid = self.extract(example, completion)
        if grid is None:
            return Verdict(status="no_answer", detail="no grid of 16 digits", score=0.0)
        if is_complete(grid) and agrees(grid, puzzle):
            return Verdict(status="right", answer=grid)
        blanks = [i for i in range(CELLS) if puzzle[i] == "0"]
        score = sum(grid[i] == solution[i] for i in blanks) / max(len(blanks), 1)
        reason = "a given cell was changed" if not agrees(grid, puzzle) else "a digit repeats"
        return Verdict(status="wrong", answer=grid, detail=reason, score=min(score, 0.99))


def _grids_of_run(run: str) -> list[str]:
    """Grids in a stretch of digits and separators: 16 in one line, or four lines of four."""
    lines = [re.sub(r"\D", "", line) for line in run.splitlines()]
    lines = [line for line in lines if line]
    grids, at = [], 0
    while at < len(lines):
        if re.fullmatch(r"[0-4]{16}", lines[at]):
            grids.append(lines[at])
        elif at + 4 <= len(lines) and all(
            re.fullmatch(r"[0-4]{4}", line) for line in lines[at : at + 4]
        ):
            grids.append("".join(lines[at : at + 4]))
            at += 3
        at += 1
    return grids
