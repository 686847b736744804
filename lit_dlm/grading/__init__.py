"""Graders: one verdict per completion, and the sandbox in which model-written code runs."""

from lit_dlm.grading.sandbox import (
    IsolationLevel,
    SandboxError,
    SandboxLimits,
    isolation_level,
    run_python_check,
)
from lit_dlm.grading.verdict import Status, Verdict

__all__ = [
    "IsolationLevel",
    "SandboxError",
    "SandboxLimits",
    "Status",
    "Verdict",
    "isolation_level",
    "run_python_check",
]
