"""Graders: one verdict per completion, and the sandbox in which model-written code runs."""

from lit_dlm.grading.sandbox import (
    IsolationLevel as IsolationLevel,
    SandboxError as SandboxError,
    SandboxLimits as SandboxLimits,
    isolation_level as isolation_level,
    run_python_check as run_python_check,
)
from lit_dlm.grading.verdict import Verdict as Verdict
