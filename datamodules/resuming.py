"""Which examples go into which batch, so that a run resumes exactly where it stopped.

Plans are pure functions of seed, batch number and rank, for a fixed number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerFn
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lit_dlm.system.options import refuse

_LENGTH_GROUP = 50  # number of batches whose examples are sorted by length together


class ExampleRef(NamedTuple):
    """One slot of a batch."""

    number: int  # number of the example
    epoch: int  # pass over the data; examples with a random part differ from pass to pass
    is_real: bool = True  # ``False`` on a copy that only fills a batch


class Plan(DistributedSampler[list[ExampleRef]]):
    """Batches of one rank; a distributed sampler, so that Lightning does not replace it.

    The epoch that Lightning sets is not read: the pass follows from the number of batches done.
    """


@dataclass(eq=False)
class EpochPlan(Plan):
    """Endless shuffled passes over examples that are stored in blocks of files.

    Each pass shuffles the blocks, cuts them into groups and shuffles the examples of each group, so
    that a reader touches few blocks at a time. A pass consists of whole updates: the few examples
    left over at its end differ between passes, and examples too few for an update are repeated.

    With ``readers`` every reader of every rank has blocks of its own, as WebDataset splits shards
    by node and worker: each block is read once a pass.
    """

    blocks: NDArray[np.integer]  # ``(N,)`` block number of every example
    _: KW_ONLY
    batch_size: int  # examples per batch and rank
    seed: int
    numbers: NDArray[np.integer]  # ``(N,)`` number of every example in its dataset
    rank: int = 0
    world_size: int = 1
    accumulate: int = 1  # batches of each rank that make an update
    readers: int = 0
    """Processes of each rank that take its batches in turn and read blocks of their own; 0 if it
    does not matter who reads what."""
    blocks_per_group: int = 64  # blocks whose examples are mixed
    lengths: NDArray[np.integer] | None = None
    """``(N,)`` length of every example, to put similar ones into one batch; by default lengths are
    mixed at random."""
    batches_done: Callable[[], int] = lambda: 0
    """Returns each rank's batches since the beginning of training; called as iteration starts."""

    def __post_init__(self) -> None:
        # Whole updates only, so that a pass never ends within one: a checkpoint holds no gradients.
        updates = len(self.blocks) // (self.batch_size * self.world_size * self.accumulate)
        self._length = max(1, updates) * self.accumulate
        self._pass: tuple[int, list[NDArray[np.int64]]] | None = None

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[list[ExampleRef]]:
        """Yields as many batches as a pass has, from the current point of training on."""
        # Asked for when iteration starts: as the loader is made, a resuming trainer is at step 0.
        first = self.batches_done()
        for number in range(first, first + len(self)):
            yield self.batch(number)

    def batch(self, number: int) -> list[ExampleRef]:
        """Returns this rank's batch ``number``, counted from the beginning of training."""
        epoch, offset = divmod(number, len(self))
        chosen = self.numbers[self.batches(epoch)[offset * self.world_size + self.rank]]
        return [ExampleRef(number, epoch) for number in chosen.tolist()]

    def batches(self, epoch: int) -> list[NDArray[np.int64]]:
        """Positions in ``blocks`` of every batch of one pass, those of all ranks in turn."""
        # A pass is planned as a whole and kept; planning ten million examples takes seconds.
        if self._pass is None or self._pass[0] != epoch:
            count = len(self) * self.world_size
            readers = self._batches_by_reader()
            # Each reader gets as many examples as its batches hold or more, if there are enough.
            ends = np.cumsum([len(numbers) for numbers in readers]) * len(self.blocks) // count
            # Every process plans the batches of all and takes its own, so that none has to be told.
            rng = np.random.default_rng([self.seed, epoch])
            order = self._shuffled(ends, rng)
            batches: list[NDArray[np.int64]] = [order] * count
            first = 0
            for numbers, end in zip(readers, ends.tolist(), strict=True):
                # A reader without examples (there are fewer than readers) repeats another one's.
                part = order[first:end] if end > first else order[:1]
                for number, batch in zip(numbers, self._cut(part, len(numbers), rng), strict=True):
                    batches[number] = batch
                first = end
            self._pass = (epoch, batches)
        return self._pass[1]

    def _batches_by_reader(self) -> list[range]:
        count = len(self) * self.world_size
        if not self.readers:
            return [range(count)]
        # A loader gives batches to its workers in turn, so a worker's are a fixed stride apart.
        stride = self.world_size * self.readers
        return [
            range(rank + reader * self.world_size, count, stride)
            for rank in range(self.world_size)
            for reader in range(self.readers)
            if rank + reader * self.world_size < count
        ]

    def _shuffled(self, ends: NDArray[np.integer], rng: np.random.Generator) -> NDArray[np.int64]:
        """Positions in ``blocks`` in the order of one pass; readers change at ``ends``."""
        # With ten million examples an array takes tens of megabytes: none is kept for long. Sorted
        # by group and then by a random key: a shuffle within groups without a loop over them.
        key = rng.random(len(self.blocks))
        names = np.unique(self.blocks)
        ranks = rng.permutation(len(names)).astype(np.int32)
        positions = ranks[np.searchsorted(names, self.blocks)]
        by_block = np.lexsort((key, positions))
        reader = np.empty(len(by_block), dtype=np.int32)
        reader[by_block] = np.repeat(np.arange(len(ends), dtype=np.int32), np.diff(ends, prepend=0))
        # A reader begins with a group of its own, though it may share its first block.
        starts = positions[by_block[np.concatenate([[0], ends[:-1]]).clip(max=len(by_block) - 1)]]
        del by_block
        positions -= starts[reader]
        positions //= self.blocks_per_group
        return np.lexsort((key, positions, reader))

    def _cut(
        self, order: NDArray[np.int64], count: int, rng: np.random.Generator
    ) -> NDArray[np.int64]:
        """Returns ``(count, batch_size)`` of shuffled examples, repeated if they are too few."""
        order = order[: count * self.batch_size]
        if self.lengths is not None:
            self._group_by_length(order, rng)
        return np.resize(order, (count, self.batch_size))

    def _group_by_length(self, order: NDArray[np.int64], rng: np.random.Generator) -> None:
        """Sorts runs of batches by length, and shuffles the batches of each run, in place."""
        assert self.lengths is not None
        # Within runs of batches: sorting a whole pass would undo the grouping by blocks.
        whole = len(order) // self.batch_size * self.batch_size
        for first in range(0, whole, _LENGTH_GROUP * self.batch_size):
            run = order[first : min(first + _LENGTH_GROUP * self.batch_size, whole)]
            by_length = run[np.argsort(self.lengths[run], kind="stable")]
            run[:] = rng.permutation(by_length.reshape(-1, self.batch_size)).ravel()


class FixedPlan(Plan):
    """One pass over given examples in order, dealt out evenly; copies fill the last batches."""

    def __init__(
        self,
        numbers: Sequence[int] | NDArray[np.integer],
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        count = len(numbers)
        # All processes run equally many batches, or those with fewer would leave the others
        # waiting; copies are marked and not counted.
        last = -(-count // world_size) * world_size
        refs = [
            ExampleRef(int(numbers[at % count]), 0, at < count)
            for at in range(rank, last, world_size)
        ]
        self.batches = [
            refs[first : first + batch_size] for first in range(0, len(refs), batch_size)
        ]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[ExampleRef]]:
        return iter(self.batches)


class ResumableLoader(DataLoader[Any]):
    """A loader without a state of its own: its position follows from the optimiser step."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Requests the first batch late, since a trainer that resumes knows its step only then."""
        yield from super().__iter__()

    # These two methods tell Lightning that resuming is exact.
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class _Listed(Dataset[Any]):
    """Data set that returns what a plan lists, unchanged."""

    def __getitem__(self, refs: list[ExampleRef]) -> list[ExampleRef]:
        return refs


def _planned_loader(
    make: Callable[[list[ExampleRef]], Any], plan: Plan, *, num_workers: int = 0
) -> ResumableLoader:
    return ResumableLoader(
        _Listed(),
        sampler=plan,
        batch_size=None,
        collate_fn=make,
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
    )


def computed_loader(make: Callable[[list[ExampleRef]], Any], count: int) -> ResumableLoader:
    """Returns a loader over ``count`` batches in order, each made from one example reference."""
    return _planned_loader(make, FixedPlan(range(count), batch_size=1))


class ResumableDataModule(LightningDataModule):
    """Data whose order follows from the optimiser step, so that a checkpoint keeps no position.

    The step determines the position only if updates consist of as many batches, of the same size
    and from as many processes, as before; a checkpoint keeps these numbers.
    """

    batch_size: int
    seed: int
    num_workers: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {} if self.trainer is None else self._update

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuses to resume with another number of processes or batches than in the checkpoint."""
        # To validate or decode, a checkpoint may be loaded with any number of processes.
        if self.trainer is None or self.trainer.state.fn != TrainerFn.FITTING:
            return
        if state_dict != self._update:
            both = (state_dict, self._update)
            saved, here = (", ".join(f"{k} {v}" for k, v in one.items()) for one in both)
            refuse("ckpt_path", f"the same run as before, {saved}", here)

    @property
    def _update(self) -> dict[str, int]:
        assert self.trainer is not None
        return {
            "processes": self.trainer.world_size,
            "accumulate_grad_batches": self.trainer.accumulate_grad_batches,
            "batch_size": self.batch_size,
        }

    def planned_training(
        self,
        make: Callable[[list[ExampleRef]], Any],
        blocks: NDArray[np.integer],
        numbers: NDArray[np.integer],
        **options: Any,
    ) -> ResumableLoader:
        """Returns a loader of shuffled batches, from the current point of training on.

        ``blocks`` and ``numbers`` are ``(N,)``, ``options`` those of :class:`EpochPlan`.
        """
        trainer = self.trainer
        for one in trainer.callbacks if trainer else ():  # type: ignore[attr-defined]
            if isinstance(one, GradientAccumulationScheduler):  # the place in the data is a product
                refuse("trainer.callbacks", "one accumulate_grad_batches", type(one).__name__)
        accumulate = 1 if trainer is None else trainer.accumulate_grad_batches
        plan = EpochPlan(
            blocks,
            numbers=numbers,
            batch_size=self.batch_size,
            seed=self.seed,
            accumulate=accumulate,
            # The trainer's own count of batches includes those of an update that was not finished.
            batches_done=lambda: 0 if trainer is None else trainer.global_step * accumulate,
            **self._place,
            **options,
        )
        return _planned_loader(make, plan, num_workers=self.num_workers)

    def planned_validation(
        self,
        make: Callable[[list[ExampleRef]], Any],
        numbers: NDArray[np.integer],
        *,
        batch_size: int,
    ) -> ResumableLoader:
        """Returns a loader of examples in order, each once; ``batch_size`` per batch and rank."""
        plan = FixedPlan(numbers, batch_size=batch_size, **self._place)
        return _planned_loader(make, plan, num_workers=self.num_workers)

    @property
    def _place(self) -> dict[str, Any]:
        trainer = self.trainer
        if trainer is None:
            return {}
        return {"rank": trainer.global_rank, "world_size": trainer.world_size}


def refuse_overfit_batches(trainer: Trainer | None, *, instead: str) -> None:
    """Refuses the trainer's ``overfit_batches``, which would replace a plan by another sampler."""
    share = 0 if trainer is None else trainer.overfit_batches  # type: ignore[attr-defined]
    if share:
        hint = f"; to train on few examples again and again, use {instead}"
        refuse("trainer.overfit_batches", 0, share, hint)
