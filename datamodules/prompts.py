"""Prompts of tasks, tokenised for decoding; decodes that are already on disk are left out."""

from __future__ import annotations

import hashlib
import logging
import math
import random
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import chain, islice, zip_longest
from typing import Literal

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from lit_dlm.decoding.api import prompt_limit
from lit_dlm.predict.decode import (
    DecodeModule,
    PromptBatch,
    PromptStream,
    StreamCalls,
    decode_uid,
    default_batch,
)
from lit_dlm.system.options import at_least, of_kind, one_of, refuse, within
from lit_dlm.tasks import PromptExample, Task, tasks_by_name
from lit_dlm.tasks.base import check_uids

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class PromptDataModule(LightningDataModule):
    """One loader per task and decoding method, for ``predict``.

    Every process lists the same work and takes its prompts from one shared queue. What
    :class:`~lit_dlm.callbacks.DecodeWriter` finds on disk is left out, so that a restart with any
    number of processes does exactly the missing work.

    Args:
        tasks: where the prompts come from.
        response_length: cells to fill in each response; with several lengths each prompt gets one
            of them, by a hash of its uid.
        batch_size: prompts decoded together; one that ends is replaced by the next. By default as
            many as have 8,192 response cells, such as 32 of 256 each. Results do not depend on it.
        max_prompt_length: most tokens of a prompt, chat template included.
        overlong: what happens to prompts with more, and to those that do not fit the model's
            positions beside their response. ``refuse`` is an error that tells how many there are;
            ``skip`` leaves them out, and the tables of a benchmark count them. Prompts are
            tokenised at the start for this.
        responses_per_prompt: responses to each prompt, each with a seed of its own; tables then
            show their mean accuracy (avg@k) and pass@k. A larger number continues a run with fewer.
            Methods that draw nothing make one response, since all would be equal.
        methods: decoders to run; all of the module's by default.
        assignment: ``each`` runs every method on every example, ``one`` gives each example one
            method, chosen by a hash of its uid.
        mix: a total number of prompts, shared among the tasks by weights; every example of every
            task by default.
    """

    tasks: list[Task]
    _: KW_ONLY
    response_length: int | list[int] = 256
    batch_size: int | None = None
    max_prompt_length: int = 2048
    overlong: Literal["refuse", "skip"] = "refuse"
    responses_per_prompt: int = 1
    methods: list[str] | None = None
    assignment: Literal["each", "one"] = "each"
    mix: PromptMix | None = None

    def __post_init__(self) -> None:
        super().__init__()
        at_least(1, tasks=len(self.tasks), batch_size=self.batch_size)
        at_least(1, responses_per_prompt=self.responses_per_prompt)
        tasks_by_name(self.tasks)
        lengths = self.response_length
        self._lengths = [lengths] if isinstance(lengths, int) else lengths
        at_least(1, response_length=min(self._lengths, default=0))
        self.rows = self.batch_size or default_batch(max(self._lengths))
        """Number of prompts that are decoded together."""
        self.done: Collection[str] = ()
        """Keys ``{uid}@{method}`` of decodes that need not be made, as set by a callback."""
        self.skipped: dict[str, int] = {}
        """Number of prompts of each task that are left out as too long."""
        self._decodes: list[tuple[str, PromptExample]] = []
        self._module: DecodeModule

    def task(self, name: str) -> Task:
        return next(task for task in self.tasks if task.name == name)

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        module = of_kind(self.trainer.lightning_module, DecodeModule, option="model")
        self._module = module
        methods = self._checked_methods(module)
        # All responses of a method that draws nothing would be equal.
        counts = {
            name: self.responses_per_prompt if module.decoders[name].draws else 1
            for name in methods
        }
        self._decodes = [
            (method, response)
            for examples in self._examples().values()
            for method in methods
            for example in examples
            if self.assignment == "each"
            # A hash and not a random number: the choice is the same in a restart with more prompts.
            or method == methods[zlib.crc32(example.uid.encode()) % len(methods)]
            for response in example.responses(counts[method])
        ]

    def _checked_methods(self, module: DecodeModule) -> list[str]:
        methods = list(dict.fromkeys(self.methods or module.decoders))
        at_least(1, methods=len(methods))
        for name in methods:
            one_of(*module.decoders, methods=name)
            decoder = module.decoders[name]
            decoder.check(module.backbone)
            known = getattr(decoder.policy, "trained_on", ())
            # Only a warning: how a policy transfers to other tasks is something to measure.
            strange = sorted({task.name for task in self.tasks}.difference(known))
            if known and strange:
                logger.warning(
                    "%s: its policy was trained on %s and never saw %s; compare with a threshold",
                    *(name, ", ".join(known), ", ".join(strange)),
                )
        return methods

    def _examples(self) -> Mapping[str, Sequence[PromptExample]]:
        examples = {task.name: list(task.examples()) for task in self.tasks}
        check_uids(examples)
        counts = {name: len(group) for name, group in examples.items()}
        at_least(1, of="tasks: examples of ", **counts)
        chosen = examples if self.mix is None else self.mix.chosen(examples)
        return {name: self._fitting(name, group) for name, group in chosen.items()}

    def _fitting(self, task: str, examples: Sequence[PromptExample]) -> list[PromptExample]:
        """Returns the prompts that fit; the same ones in every part of a run that is resumed."""
        excesses = [self._excess(one) for one in examples]
        fitting = [one for one, (excess, _) in zip(examples, excesses, strict=True) if excess <= 0]
        self.skipped[task] = count = len(examples) - len(fitting)
        if count:
            # The worst one is named, as it tells which option to raise and by how much.
            (excess, limit), uid = max(zip(excesses, (one.uid for one in examples), strict=True))
            message = f"{count} of {len(examples)} prompts of {task} are too long; "
            message += f"{uid} exceeds {limit} by {excess}"
            if self.overlong == "refuse":
                raise ValueError(f"overlong: {message}; 'skip' leaves them out and counts them")
            logger.warning("left out: %s", message)
        at_least(1, of="overlong: prompts left of ", **{task: len(fitting)})
        return fitting

    def _excess(self, example: PromptExample) -> tuple[int, str]:
        """Returns by how many tokens a prompt is too long, and what limits it."""
        length = self.length_of(example)
        most, limit = prompt_limit(self._module.backbone, length, self.max_prompt_length)
        return len(self._module.prompt_ids(example)) - most, limit

    @property
    def wanted(self) -> list[str]:
        """Keys of all decodes of the run, whether done or not."""
        return [decode_uid(example, method) for method, example in self._decodes]

    def predict_dataloader(self) -> list[DataLoader[PromptStream]]:
        """One loader per task, method and length that has work left; none when all is done."""
        return [DataLoader(StreamCalls(stream), batch_size=None) for stream in self.streams()]

    def streams(self) -> list[PromptStream]:
        """Returns the remaining work, which the processes share."""
        groups: dict[tuple[str, str, int], list[PromptExample]] = {}
        for method, example in self._decodes:
            if decode_uid(example, method) not in self.done:
                # A canvas has one length and decoder: these make a stream, with the same results.
                key = (example.task, method, self.length_of(example))
                groups.setdefault(key, []).append(example)
        stream = partial(PromptStream, encode=self._module.encode, batch_size=self.rows)
        return [
            stream(examples, method=method, response_length=length)
            for (_, method, length), examples in groups.items()
        ]

    def first_batches(self, count: int, method: str) -> Iterator[PromptBatch]:
        """Yields batches of the first ``count`` examples, of every task in turn, done or not."""
        # Every task in turn, so that few examples are not all of the first one.
        by_turns = chain.from_iterable(zip_longest(*(task.examples() for task in self.tasks)))
        fitting = (one for one in by_turns if one is not None and self._excess(one)[0] <= 0)
        by_length: dict[int, list[PromptExample]] = {}
        for example in islice(fitting, count):
            by_length.setdefault(self.length_of(example), []).append(example)
        for length, group in by_length.items():
            for first in range(0, len(group), self.rows):
                examples = group[first : first + self.rows]
                yield PromptBatch(
                    examples=examples,
                    prompt_ids=[self._module.encode(example) for example in examples],
                    method=method,
                    response_length=length,
                )

    def length_of(self, example: PromptExample) -> int:
        return drawn_length(self._lengths, example.prompt_uid, seed=self._module.seed)


@dataclass(frozen=True, kw_only=True)
class PromptMix:
    """A fixed number of prompts, shared among the tasks by weights.

    The TraceLock release takes 7,000: GSM8K 0.2, KodCode 0.2, Alpaca 0.4 (arXiv 2605.24697).
    """

    total: int
    """Prompts in all."""
    weights: dict[str, float]
    """Weight of each task by its name; normalised over the tasks of the run."""
    seed: int = 42
    """Seed of the choice within each task."""

    def __post_init__(self) -> None:
        at_least(1, of="mix.", total=self.total)
        within("(0, inf)", of="mix.weights.", **self.weights)

    def chosen(
        self, examples: Mapping[str, Sequence[PromptExample]]
    ) -> dict[str, list[PromptExample]]:
        """Returns the prompts of each task, shuffled by ``seed`` plus the number of the task.

        Their number is the task's share of ``total``, rounded by largest remainder.
        """
        if set(examples) != set(self.weights):
            names = ", ".join(self.weights) or "none"
            refuse("mix.weights", f"one for each of {', '.join(examples)}", names)
        # Rounded so that the sum is exactly the total.
        counts = largest_remainder(self.total, [self.weights[name] for name in examples])
        chosen = {}
        for number, (name, count) in enumerate(zip(examples, counts, strict=True)):
            every = list(examples[name])
            at_least(count, of="mix.total: examples of ", **{name: len(every)})
            # The release shuffles each task's prompts by a seed of its own.
            random.Random(self.seed + number).shuffle(every)
            chosen[name] = every[:count]
        return chosen


def largest_remainder(total: int, weights: Sequence[float]) -> list[int]:
    """Returns whole shares of ``total``, one per weight, rounded by largest remainder."""
    exact = [total * weight / math.fsum(weights) for weight in weights]
    counts = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda at: counts[at] - exact[at])
    for at in by_remainder[: total - sum(counts)]:
        counts[at] += 1
    return counts


def drawn_length(lengths: Sequence[int], uid: str, *, seed: int) -> int:
    """Chooses a prompt's response length by a hash of its uid, the same for all its decodes."""
    # By the prompt's uid: all methods, and all responses to a prompt, are compared at one length.
    digest = hashlib.sha256(f"length:{seed}:{uid}".encode()).digest()
    return lengths[int.from_bytes(digest[:8], "big") % len(lengths)]
