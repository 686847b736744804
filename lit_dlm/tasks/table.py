"""The task table: every task by its name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence
from typing import Any

from lit_dlm.tasks.addition import Addition
from lit_dlm.tasks.alpaca import Alpaca
from lit_dlm.tasks.base import Task
from lit_dlm.tasks.code_tests import CodeTests
from lit_dlm.tasks.countdown import Countdown
from lit_dlm.tasks.gsm8k import GSM8K
from lit_dlm.tasks.humaneval import HumanEval, HumanEvalPlus
from lit_dlm.tasks.kodcode import KodCode
from lit_dlm.tasks.math import MATH
from lit_dlm.tasks.mbpp import MBPP, MBPPPlus
from lit_dlm.tasks.prompts_file import PromptsFile
from lit_dlm.tasks.python_functions import PythonFunctions
from lit_dlm.tasks.sudoku import Sudoku
from lit_dlm.tasks.word_problems import WordProblems

TASKS: dict[str, type[Task]] = {
    "word_problems": WordProblems,
    "python_functions": PythonFunctions,
    "sudoku": Sudoku,
    "countdown": Countdown,
    "addition": Addition,
    "gsm8k": GSM8K,
    "math": MATH,
    "humaneval": HumanEval,
    "humaneval+": HumanEvalPlus,
    "mbpp": MBPP,
    "mbpp+": MBPPPlus,
    "code_tests": CodeTests,
    "kodcode": KodCode,
    "alpaca": Alpaca,
    "prompts": PromptsFile,
}
"""Name to class."""


def build_task(name: str, **kwargs: Any) -> Task:
    """Makes a task from its name in the table.

    Args:
        name: A key of :data:`TASKS`.
        **kwargs: Arguments of its class.

    Returns:
        The task.

    Raises:
        ValueError: For an unknown name or argument, naming the nearest known one.
    """
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}{_nearest(name, list(TASKS))}")
    known = list(inspect.signature(TASKS[name]).parameters)
    for argument in kwargs:
        if argument not in known:
            raise ValueError(
                f"task {name!r}: unknown setting {argument!r}{_nearest(argument, known)}"
            )
    return TASKS[name](**kwargs)


def tasks_by_name(tasks: Sequence[Task], *, option: str = "tasks") -> dict[str, Task]:
    """The tasks of a run by their names, which graders look them up by.

    Args:
        tasks: the tasks.
        option: what to call them in errors.

    Raises:
        ValueError: two have one name.
    """
    found: dict[str, Task] = {}
    for task in tasks:
        if task.name in found:
            other = found[task.name]
            raise ValueError(
                f"{option}: expected tasks of different names, got {task.name!r} twice "
                f"({type(other).__name__} of split {other.split!r} and {type(task).__name__} of "
                f"split {task.split!r}); give one another name"
            )
        found[task.name] = task
    return found


def _nearest(word: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    hint = f", nearest {nearest[0]!r}" if nearest else ""
    return f"{hint} (known: {', '.join(known)})"
