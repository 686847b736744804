"""What the puzzle tasks share: a list that comes from a file or a generator, and the exclusions.

A file holds public test problems, so it can only be tested on; training problems are generated and
never meet one of them. One text file a task in ``lit_dlm/assets/test_digests`` has the digests of
all public ones, sorted, one a line, so that the exclusion works where the files are absent.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

from lit_dlm.tasks.base import PromptExample
from lit_dlm.toy.generated import GeneratedTask, Problem

DIGEST_BYTES = 6
"""Among 4,000 problems, a random other one is excluded with a chance of about 1e-11."""


def short_digest(canonical: str) -> str:
    """12 hexadecimal digits for a problem in its one canonical form."""
    return hashlib.blake2b(canonical.encode(), digest_size=DIGEST_BYTES).hexdigest()


@cache
def shipped_digests(task: str) -> frozenset[str]:
    """The digests of all public test problems of a task."""
    path = files("lit_dlm") / "assets" / "test_digests" / f"{task}.txt"
    return frozenset(path.read_text(encoding="ascii").split())


class PuzzleTask(GeneratedTask):
    """Base of the puzzles; a subclass says how one is drawn, read and graded.

    Args:
        split: ``train`` or ``test``.
        path: a file of problems; ``None`` generates them.
        limit: use only the first so many problems of the file.
        num_examples: how many problems to generate without a file.
        seed: seed of the generated list.
        exclude_paths: further files whose problems training must never see.
        template: how a problem becomes a prompt, see :class:`GeneratedTask`.
    """

    def __init__(
        self,
        split: str = "test",
        path: str | None = None,
        *,
        limit: int | None = None,
        num_examples: int = 500,
        seed: int = 0,
        exclude_paths: Sequence[str] = (),
        template: str | None = None,
    ) -> None:
        super().__init__(split, num_examples, seed, template=template)
        if path is not None and split == "train":
            raise ValueError(
                f"{self.name}.path: files hold test problems; training ones are generated"
            )
        self.path = path
        self.limit = limit
        self._excluded = shipped_digests(self.name) | {
            short_digest(problem.key) for other in exclude_paths for problem in self.read(other)
        }

    @abstractmethod
    def read(self, path: str | Path) -> Iterable[Problem]:
        """Reads the problems of a file."""

    def is_excluded(self, problem: Problem) -> bool:
        """Whether a problem is one of the public test problems or of ``exclude_paths``."""
        return short_digest(problem.key) in self._excluded

    def examples(self) -> Sequence[PromptExample]:
        """Lists the problems."""
        if self.path is None:
            return super().examples()
        stem = Path(self.path).stem
        problems = list(self.read(self.path))[: self.limit]
        return [
            self._example(problem, f"{stem}-{index:05d}") for index, problem in enumerate(problems)
        ]
