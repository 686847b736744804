"""What the puzzle tasks share: a list that comes from a file or a generator, and the exclusions.

Files hold public test problems. Generated ones never meet these, also where the files are absent:
``lit_dlm/assets/test_digests`` has the digests of all, a text file a task.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

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
        path: a file of problems, to test on; ``None`` generates them.
    """

    def __init__(self, split: str = "test", path: str | None = None, **options: Any) -> None:
        super().__init__(split, **options)
        if path is not None and split == "train":
            raise ValueError(
                f"{self.name}.path: files hold test problems; training ones are generated"
            )
        self.path = path

    @abstractmethod
    def read(self, path: str | Path) -> Iterable[Problem]:
        """The problems of a file."""

    def is_excluded(self, problem: Problem) -> bool:
        return short_digest(problem.key) in shipped_digests(self.name)

    def examples(self) -> Sequence[PromptExample]:
        if self.path is None:
            return super().examples()
        stem, problems = Path(self.path).stem, self.read(self.path)
        return [self._example(problem, f"{stem}-{n:05d}") for n, problem in enumerate(problems)]
