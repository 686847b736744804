"""Graders: one verdict per completion, and the sandbox in which model-written code runs."""

from lit_dlm.grading.verdict import Verdict

__all__ = ["Verdict"]
