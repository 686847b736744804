"""Benchmarks and prompt sources, one file each, behind one base class."""

from lit_dlm.tasks.alpaca import Alpaca as Alpaca
from lit_dlm.tasks.base import (
    PromptExample as PromptExample,
    Task as Task,
    require_code_execution as require_code_execution,
    tasks_by_name as tasks_by_name,
)
from lit_dlm.tasks.code_tests import CodeTests as CodeTests
from lit_dlm.tasks.drawings import DrawingPrompts as DrawingPrompts, PictureScorer as PictureScorer
from lit_dlm.tasks.gsm8k import GSM8K as GSM8K
from lit_dlm.tasks.humaneval import HumanEval as HumanEval, HumanEvalPlus as HumanEvalPlus
from lit_dlm.tasks.kodcode import KodCode as KodCode
from lit_dlm.tasks.livecodebench import LiveCodeBench as LiveCodeBench
from lit_dlm.tasks.math import MATH as MATH
from lit_dlm.tasks.mbpp import MBPP as MBPP, MBPPPlus as MBPPPlus
from lit_dlm.tasks.multiple_choice import (
    GPQA as GPQA,
    MMMU as MMMU,
    MMLUPro as MMLUPro,
    MultipleChoice as MultipleChoice,
    SEEDBench as SEEDBench,
)
from lit_dlm.tasks.prompts_file import PromptsFile as PromptsFile
