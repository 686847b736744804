"""Benchmarks and prompt sources, one file each, behind one base class."""

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
