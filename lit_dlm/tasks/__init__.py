"""Benchmarks and prompt sources, one file each, behind one base class."""

from importlib import import_module
from typing import Any

from lit_dlm.tasks.alpaca import Alpaca
from lit_dlm.tasks.base import PromptExample, Task, require_code_execution, tasks_by_name
from lit_dlm.tasks.code_tests import CodeTests
from lit_dlm.tasks.drawings import DrawingPrompts, PictureScorer
from lit_dlm.tasks.gsm8k import GSM8K
from lit_dlm.tasks.humaneval import HumanEval, HumanEvalPlus
from lit_dlm.tasks.kodcode import KodCode
from lit_dlm.tasks.livecodebench import LiveCodeBench
from lit_dlm.tasks.math import MATH
from lit_dlm.tasks.mbpp import MBPP, MBPPPlus
from lit_dlm.tasks.multiple_choice import GPQA, MMMU, MMLUPro, MultipleChoice, SEEDBench
from lit_dlm.tasks.prompts_file import PromptsFile

__all__ = [
    "GPQA",
    "GSM8K",
    "MATH",
    "MBPP",
    "MMMU",
    "Alpaca",
    "CodeTests",
    "DrawingPrompts",
    "HumanEval",
    "HumanEvalPlus",
    "KodCode",
    "LiveCodeBench",
    "MBPPPlus",
    "MMLUPro",
    "MultipleChoice",
    "PictureScorer",
    "PromptExample",
    "PromptsFile",
    "SEEDBench",
    "Task",
    "require_code_execution",
    "tasks_by_name",
]

_TOY_TASKS = ("Addition", "Countdown", "PythonFunctions", "Sudoku", "WordProblems")


def __getattr__(name: str) -> Any:
    # Configurations saved by version 0.1 name these classes here.
    if name in _TOY_TASKS:
        return getattr(import_module("lit_dlm.toy"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
