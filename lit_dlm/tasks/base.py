"""The base of tasks: prompt, answer extraction and grading of one benchmark, kept together."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lit_dlm.grading import IsolationLevel, Verdict, isolation_level
from lit_dlm.plugs import Plug, completed


@dataclass(frozen=True, kw_only=True)
class PromptExample:
    """One problem. ``uid`` is stable and is the key of the sample everywhere."""

    uid: str
    """``{task}/{split}/{name}``, for example ``gsm8k/test/00012``; never depends on a limit. Of
    several responses to a prompt the second is ``gsm8k/test/00012#1``, and so on."""
    task: str
    """Name of the task."""
    text: str
    """The user turn, before any chat template."""
    answer_start: str = ""
    """Text that the answer begins with, put behind the chat template: the model goes on from it. It
    is no part of the completion, but graders of code read it in front."""
    reference: dict[str, Any] = field(default_factory=dict)
    """What grading needs (JSON types only)."""
    response: int = 0
    """Number of the response, of several to one prompt."""

    @property
    def prompt_uid(self) -> str:
        """Uid of the prompt, which is that of its first response."""
        return self.uid.removesuffix(f"#{self.response}") if self.response else self.uid

    def responses(self, count: int) -> list[PromptExample]:
        """The same problem to be answered several times, each time with a seed of its own.

        Args:
            count: how many answers; the first is this very example.
        """
        others = range(1, count)
        return [self, *(replace(self, uid=f"{self.uid}#{n}", response=n) for n in others)]


class Task(Plug):
    """A benchmark or a source of prompts."""

    name: str
    split: str = "test"
    runs_code: bool = False
    """Whether grading executes model-written code (then ``allow_code_execution`` is required)."""
    template: str | None = None
    """Text of the template given in place of the task's own (:mod:`lit_dlm.tasks.templates`)."""

    @property
    def is_graded(self) -> bool:
        """Whether completions can be judged; plain prompts cannot."""
        return True

    @abstractmethod
    def examples(self) -> Sequence[PromptExample]:
        """All problems of the split in a stable order, after ``limit``."""

    @abstractmethod
    def reference_completion(self, example: PromptExample) -> str:
        """A completion that grades as right (used for self-checks and supervised training)."""

    @abstractmethod
    def extract(self, example: PromptExample, completion: str) -> str | None:
        """The answer inside a completion, or ``None`` when there is none."""

    @abstractmethod
    def grade(self, example: PromptExample, completion: str) -> Verdict:
        """Grades one completion (text after the prompt, cut at the first end of text)."""


def tasks_by_name(tasks: Sequence[Task], *, option: str = "tasks") -> dict[str, Task]:
    """The tasks of a run by their names, which graders look them up by.

    Args:
        tasks: the tasks.
        option: what to call them in errors.

    Raises:
        ValueError: two have one name, or one lacks a member.
    """
    found: dict[str, Task] = {}
    for task in tasks:
        completed(task, Task, option=option)
        if task.name in found:
            other = found[task.name]
            raise ValueError(
                f"{option}: expected tasks of different names, got {task.name!r} twice "
                f"({type(other).__name__} of split {other.split!r} and {type(task).__name__} of "
                f"split {task.split!r}); give one another name"
            )
        found[task.name] = task
    return found


def require_code_execution(
    tasks: Iterable[Task], *, isolation: IsolationLevel = "landlock"
) -> IsolationLevel | None:
    """Refuses tasks that could not be graded as wanted, before the first decode.

    Args:
        tasks: the tasks of a run.
        isolation: the least that model-written code must run in.

    Returns:
        What it will run in; ``None`` if no task runs code.

    Raises:
        ValueError: a task runs code without permission, or this machine isolates it less.
        SandboxError: there is no sandbox here.
    """
    running = [task for task in tasks if task.runs_code]
    for task in running:
        if not getattr(task, "allow_code_execution", False):
            raise ValueError(
                f"{task.name}: grading runs model-written code; set allow_code_execution: true in "
                "the task to allow it"
            )
    if not running:
        return None
    level = isolation_level()
    if isolation == "namespaces" and level != isolation:
        raise ValueError(
            f"require_isolation: expected namespaces, got {level}, which is all that this machine "
            "gives ('lit-dlm doctor' says why); install bubblewrap, allow user namespaces, or set "
            f"require_isolation: {level} (SECURITY.md)"
        )
    return level


def check_uids(examples: Mapping[str, Sequence[PromptExample]]) -> None:
    """Refuses two prompts of one uid: the results of one would count as those of the other.

    Args:
        examples: the prompts of every task, by its name.

    Raises:
        ValueError: names the uid, both tasks and both rows.
    """
    seen: dict[str, str] = {}
    for name, group in examples.items():
        for row, example in enumerate(group):
            origin = f"row {row} of task {name!r}"
            if example.uid in seen:
                raise ValueError(
                    f"tasks: expected every prompt to have a uid of its own, got {example.uid!r} "
                    f"for {seen[example.uid]} and {origin}"
                )
            seen[example.uid] = origin
