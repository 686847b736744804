"""What the puzzle tasks share: a list that comes from a file or a generator, and the exclusions.

A file holds public test problems, so it can only be tested on; training problems are generated and
never meet one of them: the digests of all public ones are shipped next to the tasks.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

from lit_dlm.tasks.base import PromptExample, Task
from lit_dlm.tasks.digests import shipped_digests, short_digest
from lit_dlm.tasks.generated import Problem, check_split, draw_of_split, generated_examples
from lit_dlm.tasks.templates import PromptTemplate


class PuzzleTask(Task):
    """Base of the puzzles; a subclass says how one is drawn, read and graded."""

    runs_code = False

    def __init__(
        self,
        split: str,
        path: str | None,
        *,
        limit: int | None,
        num_examples: int,
        seed: int,
        exclude_paths: Sequence[str],
        template: str | None,
    ) -> None:
        """Sets up one split.

        Args:
            split: ``train`` or ``test``.
            path: a file of problems; ``None`` generates them.
            limit: use only the first so many problems of the file.
            num_examples: how many problems to generate without a file.
            seed: seed of the generated list.
            exclude_paths: further files whose problems training must never see.
            template: how a problem becomes a prompt: a shipped name, a file or a Jinja text
                (:mod:`lit_dlm.tasks.templates`); the problem itself by default.

        Raises:
            ValueError: the split is unknown, or training is asked for on a file.
        """
        self.split: str = check_split(self.name, split)
        if path is not None and split == "train":
            raise ValueError(
                f"{self.name}.path: files hold test problems; training ones are generated"
            )
        self.path = path
        self.limit = limit
        self.num_examples = num_examples
        self.seed = seed
        self._template = PromptTemplate(template)
        self.template = self._template.given
        self._excluded = shipped_digests(self.name) | {
            short_digest(problem.key) for other in exclude_paths for problem in self.read(other)
        }

    @abstractmethod
    def draw(self, rng: random.Random) -> Problem:
        """Draws a problem of either split.

        Args:
            rng: the generator that decides everything.
        """

    @abstractmethod
    def read(self, path: str | Path) -> Iterable[Problem]:
        """Reads the problems of a file.

        Raises:
            ValueError: a row is not a problem; names file and row.
        """

    def is_excluded(self, problem: Problem) -> bool:
        """Whether a problem is one of the public test problems or of ``exclude_paths``."""
        return short_digest(problem.key) in self._excluded

    def draw_training(self, rng: random.Random) -> Problem:
        """Draws a problem of the training split that is not excluded."""
        return draw_of_split(self.draw, rng, split="train", excluded=self.is_excluded)

    def examples(self) -> Sequence[PromptExample]:
        """Lists the problems."""
        if self.path is None:
            return generated_examples(
                self.draw,
                task=self.name,
                split=check_split(self.name, self.split),
                num_examples=self.num_examples,
                seed=self.seed,
                excluded=self.is_excluded,
                template=self._template,
            )
        stem = Path(self.path).stem
        return [
            PromptExample(
                uid=f"{self.name}/{self.split}/{stem}-{index:05d}",
                task=self.name,
                reference=problem.reference,
                **self._template.render({**problem.reference, "question": problem.text}),
            )
            for index, problem in enumerate(list(self.read(self.path))[: self.limit])
        ]
