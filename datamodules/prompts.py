"""Prompts of tasks, tokenised for decoding; work that is already on disk is left out."""

from __future__ import annotations

import hashlib
import logging
import math
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Literal

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, IterableDataset

from lit_dlm.modules.decode import DecodeModule, PromptBatch, PromptStream, decode_uid
from lit_dlm.ops.options import at_least
from lit_dlm.reports.results import ResultFolder
from lit_dlm.tasks import PromptExample, Task, tasks_by_name
from lit_dlm.tasks.base import check_uids
from lit_dlm.trajectories.store import completed_uids, recover

logger = logging.getLogger(__name__)


class PromptDataModule(LightningDataModule):
    """One loader per task and decoding method, for ``predict``.

    Every process lists the examples that the result or trajectory folder does not hold yet and
    takes them from a queue that all share, so a restart with any number of processes does exactly
    the missing work.

    Args:
        tasks: where the prompts come from.
        response_length: cells to fill in each response; of several lengths each prompt gets one, by
            a hash of its uid.
        batch_size: prompts decoded together; one that ends is replaced by the next. Results do not
            depend on it.
        max_prompt_length: most tokens of a prompt, chat template included; longer is an error.
        responses_per_prompt: responses to each prompt, each with a seed of its own; tables then
            give their mean accuracy (avg@k) and pass@k. A larger number goes on from a smaller one.
            Methods that draw nothing give one response, since all would be equal.
        methods: decoders to run; all of the module by default.
        assignment: ``each`` runs every method on every example, ``one`` gives each example one
            method, chosen by a hash of its uid.
        results_dir: folder of benchmark results to resume from.
        mix: takes a number of prompts in all, shared by the tasks according to weights; every
            example of every task by default.
        trajectories_dir: folder of trajectory shards to resume from. With both folders a sample
            counts as done only when both hold it.
    """

    def __init__(
        self,
        tasks: list[Task],
        *,
        response_length: int | list[int] = 256,
        batch_size: int = 32,
        max_prompt_length: int = 2048,
        responses_per_prompt: int = 1,
        methods: list[str] | None = None,
        assignment: Literal["each", "one"] = "each",
        results_dir: str | None = None,
        trajectories_dir: str | None = None,
        mix: PromptMix | None = None,
    ) -> None:
        super().__init__()
        if not tasks:
            raise ValueError("tasks: expected at least one task, got none")
        at_least(1, batch_size=batch_size, responses_per_prompt=responses_per_prompt)
        tasks_by_name(tasks)
        self.tasks = tasks
        lengths = [response_length] if isinstance(response_length, int) else response_length
        if not lengths or min(lengths) < 1:
            raise ValueError(f"response_length: expected at least 1, got {response_length}")
        self.response_length = response_length
        self.mix = mix
        self.batch_size = batch_size
        self.max_prompt_length = max_prompt_length
        self.responses_per_prompt = responses_per_prompt
        self.methods = methods
        self.assignment = assignment
        self.results_dir = results_dir
        self.trajectories_dir = trajectories_dir
        self._work: list[tuple[str, int, list[PromptExample]]] = []
        self.wanted: list[str] = []
        """Keys of all decodes of the run, done or not."""
        self._module: DecodeModule | None = None

    def task(self, name: str) -> Task:
        """The task of a given name."""
        return next(task for task in self.tasks if task.name == name)

    def setup(self, stage: str) -> None:
        """Lists the work that is left."""
        assert self.trainer is not None
        module = self.trainer.lightning_module
        if not isinstance(module, DecodeModule):
            raise ValueError(f"model: expected a DecodeModule, got {type(module).__name__}")
        self._module = module
        methods = self.methods or list(module.decoders)
        unknown = [name for name in methods if name not in module.decoders]
        if unknown or not methods:
            raise ValueError(
                f"methods: expected some of {', '.join(module.decoders) or '(no decoders)'}, "
                f"got {', '.join(methods) or 'none'}"
            )
        for name in methods:
            decoder = module.decoders[name]
            decoder.check(module.backbone)
            known = getattr(decoder.policy, "trained_on", ())
            strange = sorted({task.name for task in self.tasks}.difference(known))
            if known and strange:
                logger.warning(
                    "%s: its policy was trained on %s and never saw %s; compare with a threshold",
                    *(name, ", ".join(known), ", ".join(strange)),
                )
        recorded: set[str] = set()
        if self.trajectories_dir:
            folder = Path(self.trajectories_dir)
            if self.trainer.is_global_zero:
                # What a killed run left half-written counts as done too.
                recover(folder)
            self.trainer.strategy.barrier("recovered")
            recorded = completed_uids(folder)
        results = ResultFolder(Path(self.results_dir)) if self.results_dir else None
        self._work, self.wanted = [], []
        examples = {task.name: list(task.examples()) for task in self.tasks}
        check_uids(examples)
        for name, group in examples.items():
            if not group:
                raise ValueError(f"tasks: {name} has no examples; expected at least one")
        if self.mix is not None:
            examples = self.mix.chosen(examples)
        for task in self.tasks:
            for method in methods:
                # Of a method that draws nothing all responses would be equal.
                count = self.responses_per_prompt if module.decoders[method].draws else 1
                assigned = [
                    response
                    for example in examples[task.name]
                    if self._assigned(example, methods, method)
                    for response in example.responses(count)
                ]
                self.wanted += [decode_uid(example, method) for example in assigned]
                done = {e.uid for e in assigned if decode_uid(e, method) in recorded}
                if results is not None:
                    graded = results.completed(task.name, method)
                    done = graded & done if self.trajectories_dir else graded
                left = [example for example in assigned if example.uid not in done]
                by_length: dict[int, list[PromptExample]] = {}
                for example in left:
                    by_length.setdefault(self.length_of(example), []).append(example)
                self._work += [(method, length, group) for length, group in by_length.items()]
        # Before any process writes what another would then not list.
        self.trainer.strategy.barrier("work listed")

    def _assigned(self, example: PromptExample, methods: Sequence[str], method: str) -> bool:
        if self.assignment == "each":
            return True
        return methods[zlib.crc32(example.uid.encode()) % len(methods)] == method

    def predict_dataloader(self) -> list[DataLoader[PromptStream]]:
        """One loader per task, method and length that has work left; none when all is done."""
        return [DataLoader(_Stream(stream), batch_size=None) for stream in self.streams()]

    def streams(self) -> list[PromptStream]:
        """The work that is left, which the processes share."""
        return [
            PromptStream(
                examples,
                self.encode,
                method=method,
                response_length=length,
                batch_size=self.batch_size,
            )
            for method, length, examples in self._work
        ]

    def transfer_batch_to_device(
        self, batch: PromptStream, device: torch.device, dataloader_idx: int
    ) -> PromptStream:
        """Leaves the prompts alone: the module builds the canvas on its device."""
        return batch

    def first_batches(self, count: int, method: str) -> Iterator[PromptBatch]:
        """Batches of the first examples of every task in turn, whatever is already done.

        Args:
            count: examples in all.
            method: decoder to name in the batches.
        """
        by_turns = chain.from_iterable(zip_longest(*(task.examples() for task in self.tasks)))
        chosen = list(islice((example for example in by_turns if example is not None), count))
        by_length: dict[int, list[PromptExample]] = {}
        for example in chosen:
            by_length.setdefault(self.length_of(example), []).append(example)
        for length, group in by_length.items():
            for first in range(0, len(group), self.batch_size):
                examples = group[first : first + self.batch_size]
                yield PromptBatch(
                    examples=examples,
                    prompt_ids=[self.encode(example) for example in examples],
                    method=method,
                    response_length=length,
                )

    def length_of(self, example: PromptExample) -> int:
        """Cells of a prompt's response."""
        if isinstance(self.response_length, int):
            return self.response_length
        assert self._module is not None
        return drawn_length(self.response_length, example.prompt_uid, seed=self._module.seed)

    def encode(self, example: PromptExample) -> list[int]:
        """Token ids of one prompt: a single user turn through the chat template.

        Raises:
            ValueError: the prompt is longer than ``max_prompt_length``.
        """
        assert self._module is not None
        ids = self._module.encode(example)
        if len(ids) > self.max_prompt_length:
            raise ValueError(
                f"{example.uid}: the prompt has {len(ids)} tokens, expected at most "
                f"max_prompt_length = {self.max_prompt_length}"
            )
        return ids


class _Stream(IterableDataset[PromptStream]):
    """A stream as a data set: itself, once for each batch that it will give."""

    def __init__(self, stream: PromptStream) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[PromptStream]:
        return iter(self.stream)

    def __len__(self) -> int:
        return len(self.stream)


@dataclass(frozen=True, kw_only=True)
class PromptMix:
    """A fixed number of prompts, shared by the tasks according to weights.

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
        for name, weight in self.weights.items():
            if not (math.isfinite(weight) and weight > 0.0):
                raise ValueError(f"mix.weights.{name}: expected a positive number, got {weight}")

    def chosen(
        self, examples: Mapping[str, Sequence[PromptExample]]
    ) -> dict[str, list[PromptExample]]:
        """The prompts of each task, chosen by ``seed`` plus the place of the task.

        Args:
            examples: all examples by task, in the order of the run.

        Returns:
            As many as the task's share of ``total``, by largest remainder.

        Raises:
            ValueError: weights are not given for exactly these tasks, or a task has too few
                examples.
        """
        if set(examples) != set(self.weights):
            raise ValueError(
                f"mix.weights: expected one for each of {', '.join(examples)}, got "
                f"{', '.join(self.weights) or 'none'}"
            )
        counts = largest_remainder(self.total, [self.weights[name] for name in examples])
        found = {}
        for place, ((name, every), count) in enumerate(zip(examples.items(), counts, strict=True)):
            if count > len(every):
                raise ValueError(
                    f"mix: task '{name}' has {len(every)} examples, its share is {count}"
                )
            order = list(range(len(every)))
            random.Random(self.seed + place).shuffle(order)
            found[name] = [every[at] for at in order[:count]]
        return found


def largest_remainder(total: int, weights: Sequence[float]) -> list[int]:
    """Whole shares of ``total`` in proportion to weights.

    Args:
        total: what is shared out.
        weights: positive.

    Returns:
        One count per weight; they sum to ``total``. Left-overs go to the largest remainders, the
        earlier one of equals.
    """
    exact = [total * weight / math.fsum(weights) for weight in weights]
    counts = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda at: counts[at] - exact[at])
    for at in by_remainder[: total - sum(counts)]:
        counts[at] += 1
    return counts


def drawn_length(lengths: Sequence[int], uid: str, *, seed: int) -> int:
    """One of several response lengths for a prompt, by a hash of its uid.

    Args:
        lengths: what there is to choose from.
        uid: uid of the prompt; all its decodes have one length.
        seed: seed of the draw.
    """
    digest = hashlib.sha256(f"length:{seed}:{uid}".encode()).digest()
    return lengths[int.from_bytes(digest[:8], "big") % len(lengths)]
