"""Problems made on the fly: how they are split, numbered and drawn for training.

A generated task is a function that draws one :class:`Problem` from a random generator. The split
is a property of the problem itself: a hash of its ``key`` (the numbers and operations, not the
names around them) sends one problem in ten to the test split. So training can draw for ever
without meeting a test problem, and nothing has to be stored.
"""

from __future__ import annotations

import hashlib
import random
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from lit_dlm.tasks.base import PromptExample, Task
from lit_dlm.tasks.templates import PromptTemplate

Split = Literal["train", "test"]

MAX_DRAWS_PER_EXAMPLE = 5_000
"""Draws without a new problem after which a generator counts as exhausted."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One generated problem."""

    key: str
    """What makes the problem this problem; equal keys are the same problem in other words."""
    text: str
    """The user turn."""
    reference: dict[str, Any]
    """What grading needs (JSON types only)."""


Draw = Callable[[random.Random], Problem]
"""Draws any problem of a task, of whichever split."""


class TrainingSource(Protocol):
    """What pretraining needs of a task: endless pairs of prompt and right completion."""

    def draw_pair(self, rng: random.Random) -> tuple[str, str]:
        """Draws a problem of the training split and a completion in a random style.

        Args:
            rng: the generator that decides everything.

        Returns:
            The user turn and a completion that grades as right.
        """
        ...


class DrillSource(Protocol):
    """A task that also offers drills: lines of arithmetic without a prompt."""

    def draw_drill(self, rng: random.Random) -> str:
        """Draws one line of equations, each written ``a<op>b=c``.

        Args:
            rng: the generator that decides everything.

        Returns:
            The line.
        """
        ...


def is_held_out(key: str) -> bool:
    """Whether a problem belongs to the test split (one key in ten does).

    Args:
        key: the problem's key.

    Returns:
        ``True`` for the test split. The answer depends on the key alone.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 10 == 0


def check_split(task: str, split: str) -> Split:
    """Checks the name of a split.

    Args:
        task: name of the task, for the message.
        split: the name given.

    Returns:
        The same name, typed.

    Raises:
        ValueError: if it is neither ``train`` nor ``test``.
    """
    if split == "train":
        return "train"
    if split == "test":
        return "test"
    raise ValueError(f"{task}.split: expected 'train' or 'test', got {split!r}")


def draw_of_split(
    draw: Draw,
    rng: random.Random,
    *,
    split: Split,
    excluded: Callable[[Problem], bool] | None = None,
) -> Problem:
    """Draws until a problem of the wanted split comes.

    Args:
        draw: the generator of problems.
        rng: the generator that decides everything.
        split: the wanted split.
        excluded: says which problems must not be drawn whatever their hash.

    Returns:
        The problem.

    Raises:
        ValueError: if none came in :data:`MAX_DRAWS_PER_EXAMPLE` draws.
    """
    for _ in range(MAX_DRAWS_PER_EXAMPLE):
        problem = draw(rng)
        if is_held_out(problem.key) != (split == "test"):
            continue
        if excluded is None or not excluded(problem):
            return problem
    raise ValueError(f"no problem of the {split} split in {MAX_DRAWS_PER_EXAMPLE} draws")


def generated_examples(
    draw: Draw,
    *,
    task: str,
    split: Split,
    num_examples: int,
    seed: int,
    excluded: Callable[[Problem], bool] | None = None,
    template: PromptTemplate | None = None,
) -> list[PromptExample]:
    """Lists distinct problems of one split in a stable order.

    Problem ``i`` depends on the seed and ``i`` only, never on how many are asked for.

    Args:
        draw: the generator of problems.
        task: name of the task, the first part of every uid.
        split: the wanted split.
        num_examples: how many problems.
        seed: seed of the list. The split does not depend on it.
        excluded: says which problems must not be listed whatever their hash.
        template: makes the prompts; a problem's own text by default.

    Returns:
        ``num_examples`` problems, no two with the same key.

    Raises:
        ValueError: if ``num_examples`` is negative or the generator has too few problems.
    """
    if num_examples < 0:
        raise ValueError(f"{task}.num_examples: expected 0 or more, got {num_examples}")
    rng = random.Random(f"{task}/{split}/{seed}")
    template = template or PromptTemplate(None)
    seen: set[str] = set()
    examples: list[PromptExample] = []
    repeats = 0
    while len(examples) < num_examples:
        problem = draw_of_split(draw, rng, split=split, excluded=excluded)
        if problem.key in seen:
            repeats += 1
            if repeats > MAX_DRAWS_PER_EXAMPLE:
                raise ValueError(
                    f"{task}.num_examples: the {split} split ran out at {len(examples)} distinct "
                    f"problems, asked for {num_examples}"
                )
            continue
        repeats = 0
        seen.add(problem.key)
        examples.append(
            PromptExample(
                uid=f"{task}/{split}/{len(examples):05d}",
                task=task,
                reference=problem.reference,
                **template.render({**problem.reference, "question": problem.text}),
            )
        )
    return examples


class GeneratedTask(Task):
    """Base of generated tasks; a subclass says how a problem is drawn, solved and graded."""

    runs_code = False

    def __init__(
        self,
        split: str = "test",
        num_examples: int = 500,
        seed: int = 0,
        *,
        template: str | None = None,
    ) -> None:
        """Sets up one split.

        Args:
            split: ``train`` or ``test``; a hash of the problem decides, the seed does not.
            num_examples: how many distinct problems :meth:`examples` lists.
            seed: seed of that list.
            template: how a problem becomes a prompt: a shipped name, a file or a Jinja text
                (:mod:`lit_dlm.tasks.templates`); the problem itself by default.

        Raises:
            ValueError: the split is unknown.
        """
        self.split: Split = check_split(self.name, split)
        self.num_examples = num_examples
        self.seed = seed
        self._template = PromptTemplate(template)
        self.template = self._template.given

    @abstractmethod
    def draw(self, rng: random.Random) -> Problem:
        """Draws a problem of either split.

        Args:
            rng: the generator that decides everything.
        """

    def is_excluded(self, problem: Problem) -> bool:
        """Whether a problem must not be drawn whatever its split."""
        return False

    def draw_training(self, rng: random.Random) -> Problem:
        """Draws a problem of the training split."""
        return draw_of_split(self.draw, rng, split="train", excluded=self.is_excluded)

    def examples(self) -> Sequence[PromptExample]:
        """Lists the problems, no two with the same key."""
        return generated_examples(
            self.draw,
            task=self.name,
            split=self.split,
            num_examples=self.num_examples,
            seed=self.seed,
            excluded=self.is_excluded,
            template=self._template,
        )
