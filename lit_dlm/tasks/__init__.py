"""Benchmarks and prompt sources, one file each, behind one protocol."""

from lit_dlm.tasks.base import PromptExample, Task

__all__ = ["PromptExample", "Task"]
