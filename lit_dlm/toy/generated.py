"""Problems made on the fly: how they are split, numbered and drawn for training.

A hash of a problem's ``key`` (the numbers and operations, not the names around them) puts one in
ten into the test split, so training can draw for ever without meeting one of these.
"""

from __future__ import annotations

import hashlib
import random
import re
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

from lit_dlm.grading import Verdict
from lit_dlm.grading.answers import judged
from lit_dlm.system.options import one_of
from lit_dlm.tasks.base import PromptExample, PromptTemplate, Task
from lit_dlm.tasks.sources import Row, read_rows
from lit_dlm.vision.pictures import Picture

MAX_DRAWS_PER_EXAMPLE = 5_000  # without a new problem: a generator is exhausted
_TAGGED = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One generated problem; see :class:`PromptExample`."""

    key: str  # what identifies the problem; equal keys are the same problem in other words
    text: str
    reference: dict[str, Any]
    images: tuple[Picture, ...] = ()
    stratum: str = ""  # one of the task's strata


class TrainingSource(Protocol):
    """What pretraining needs of a task: endless pairs of prompt and right completion."""

    def draw_pair(self, rng: random.Random) -> tuple[str, str]: ...


class DrillSource(Protocol):
    """A task that also offers drills: lines of equations ``a<op>b=c`` without a prompt."""

    def draw_drill(self, rng: random.Random) -> str: ...


def tenth_of(key: str) -> int:
    """Returns which of ten equal parts a key belongs to, 0 to 9."""
    # A hash and no list: it decides for problems that nobody has drawn yet, on every machine alike
    # (Python's own ``hash`` of texts differs from process to process).
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 10


def is_held_out(key: str) -> bool:
    """Whether the problem of a key belongs to the test split: one in ten, by the key alone."""
    return tenth_of(key) == 0


class GeneratedTask(Task):
    """Base of generated tasks; a subclass says how a problem is drawn, solved and graded.

    Args:
        split: ``train`` or ``test``; a hash of the problem decides, the seed does not.
        num_examples: how many distinct problems :meth:`examples` lists.
        seed: seed of that list.
        template: how a problem becomes a prompt (:func:`~lit_dlm.tasks.base.template_text`);
            the problem itself by default.
    """

    splits: tuple[str, ...] = ("train", "test")
    missing: str  # says in verdicts what a completion without an answer lacks
    answer_field = "answer"  # field of a reference that grade compares with
    strata: tuple[str, ...] = ("",)  # of a list, in equal shares

    def __init__(
        self,
        split: str = "test",
        num_examples: int = 500,
        seed: int = 0,
        *,
        template: str | None = None,
    ) -> None:
        one_of(*self.splits, of=f"{self.name}.", split=split)
        self.split = split
        self.num_examples = num_examples
        self.seed = seed
        self._template = PromptTemplate(template)
        self.template = self._template.given

    @abstractmethod
    def draw(self, rng: random.Random) -> Problem:
        """Draws a problem of either split."""

    def write_answer(self, reference: dict[str, Any], rng: random.Random) -> str:
        """Returns a right completion, in one of the task's styles."""
        return str(reference[self.answer_field])

    def draw_pair(self, rng: random.Random) -> tuple[str, str]:
        problem = self._draw_of_split(rng, "train")
        return problem.text, self.write_answer(problem.reference, rng)

    def reference_completion(self, example: PromptExample) -> str:
        # The style follows from the uid, so that a set of references is always the same.
        return self.write_answer(example.reference, random.Random(example.uid))

    def grade(self, example: PromptExample, completion: str) -> Verdict:
        wanted = str(example.reference[self.answer_field])
        answer = self.extract(example, completion)
        return judged(answer, answer == wanted, expected=wanted, missing=self.missing)

    def is_of_split(self, problem: Problem, split: str) -> bool:
        return is_held_out(problem.key) == (split == "test")

    def _draw_of_split(self, rng: random.Random, split: str) -> Problem:
        for _ in range(MAX_DRAWS_PER_EXAMPLE):
            problem = self.draw(rng)
            if self.is_of_split(problem, split):
                return problem
        raise ValueError(
            f"{self.name}: no problem of the {split} split in {MAX_DRAWS_PER_EXAMPLE} draws"
        )

    def examples(self) -> Sequence[PromptExample]:
        """Returns problems with different keys; number ``i`` depends on the seed and ``i`` only.

        Strata take turns, which gives them equal shares at any length. Within a stratum, kinds that
        have few problems become rarer as the list grows.
        """
        # One stream for all: a longer list begins with the shorter one.
        rng = random.Random(f"{self.name}/{self.split}/{self.seed}")
        listed: list[Problem] = []
        seen: set[str] = set()
        # Drawn while another stratum was wanted.
        waiting: dict[str, deque[Problem]] = {one: deque() for one in self.strata}
        while len(listed) < self.num_examples:
            wanted = self.strata[len(listed) % len(self.strata)]
            # In a row, not in all: near its end a stratum still has one in thousands of draws.
            num_draws = 0
            while not waiting[wanted]:
                num_draws += 1
                if num_draws > MAX_DRAWS_PER_EXAMPLE:
                    of = f" of {wanted!r}" if wanted else ""
                    raise ValueError(
                        f"{self.name}.num_examples: the {self.split} split{of} ran out at "
                        f"{len(listed)} distinct problems, expected {self.num_examples}"
                    )
                problem = self._draw_of_split(rng, self.split)
                if problem.key not in seen:
                    seen.add(problem.key)
                    waiting[problem.stratum].append(problem)
            listed.append(waiting[wanted].popleft())
        return [self._example(one, f"{number:05d}") for number, one in enumerate(listed)]

    def _example(self, problem: Problem, key: str) -> PromptExample:
        return PromptExample(
            uid=f"{self.name}/{self.split}/{key}",
            task=self.name,
            reference=problem.reference,
            images=problem.images,
            **self._template.render({**problem.reference, "question": problem.text}),
        )


def tagged_answer(completion: str) -> str:
    """Returns what stands in the last ``<answer>`` tags, else the whole text."""
    tagged = _TAGGED.findall(completion)
    return str(tagged[-1]) if tagged else completion


def short_digest(key: str) -> str:
    """Returns 12 hexadecimal digits; a random key matches one of 4,000 with a chance of 1e-11."""
    return hashlib.blake2b(key.encode(), digest_size=6).hexdigest()


@cache
def shipped_digests(task: str) -> frozenset[str]:
    """Returns the digests of all public test problems of a task."""
    path = files("lit_dlm") / "assets" / "test_digests" / f"{task}.txt"
    return frozenset(path.read_text(encoding="ascii").split())


class PuzzleTask(GeneratedTask):
    """Base of puzzles that have public test problems, in files; these are never drawn.

    Args:
        split: ``train`` or ``test``.
        path: a file of test problems, listed in its order; ``None`` generates them.
        num_examples: most problems; by default all of a file, or 500 generated ones.
    """

    def __init__(
        self,
        split: str = "test",
        path: str | None = None,
        num_examples: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(split, 500 if num_examples is None else num_examples, **options)
        self._most = num_examples
        if path is not None and split == "train":
            raise ValueError(f"{self.name}.path: expected null for training: files are for tests")
        self.path = path

    @abstractmethod
    def read(self, row: Row) -> Problem:
        """Returns the problem in a row of a file."""

    def is_of_split(self, problem: Problem, split: str) -> bool:
        # d1 and Dream know nothing of our split, which would train on nine in ten of their tests.
        is_public = short_digest(problem.key) in shipped_digests(self.name)
        return super().is_of_split(problem, split) and not is_public

    def examples(self) -> Sequence[PromptExample]:
        if self.path is None:
            return super().examples()
        stem = Path(self.path).stem
        rows = read_rows(self.path, split=self.split, required=())[: self._most]
        return [self._example(self.read(row), f"{stem}-{row.index:05d}") for row in rows]
