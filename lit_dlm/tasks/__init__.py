"""Benchmarks and prompt sources, one file each, behind one protocol."""

from lit_dlm.tasks.base import PromptExample, Task
from lit_dlm.tasks.countdown import Countdown
from lit_dlm.tasks.python_functions import PythonFunctions
from lit_dlm.tasks.sudoku import Sudoku
from lit_dlm.tasks.word_problems import WordProblems

__all__ = ["Countdown", "PromptExample", "PythonFunctions", "Sudoku", "Task", "WordProblems"]
