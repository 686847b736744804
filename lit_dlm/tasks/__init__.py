"""Benchmarks and prompt sources, one file each, behind one protocol."""

from lit_dlm.tasks.addition import Addition
from lit_dlm.tasks.alpaca import Alpaca
from lit_dlm.tasks.base import PromptExample, Task
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
from lit_dlm.tasks.table import TASKS, build_task, tasks_by_name
from lit_dlm.tasks.word_problems import WordProblems

__all__ = [
    "GSM8K",
    "MATH",
    "MBPP",
    "TASKS",
    "Addition",
    "Alpaca",
    "CodeTests",
    "Countdown",
    "HumanEval",
    "HumanEvalPlus",
    "KodCode",
    "MBPPPlus",
    "PromptExample",
    "PromptsFile",
    "PythonFunctions",
    "Sudoku",
    "Task",
    "WordProblems",
    "build_task",
    "tasks_by_name",
]
