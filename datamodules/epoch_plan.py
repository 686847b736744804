"""Which examples go into which batch: pure functions of seed, batch number and rank.

Because batch ``n`` can be computed without the ones before it, a resumed run starts at the batch it
stopped at, and replays or skips nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler

_LENGTH_GROUP = 50
"""Batches whose examples are sorted by length together."""


class ExampleRef(NamedTuple):
    """One slot of a batch."""

    number: int
    """Number of the example."""
    epoch: int
    """Pass over the data; examples with a random part differ from pass to pass."""
    is_real: bool = True
    """``False`` on a copy that only fills a batch."""


class Plan(DistributedSampler[list[ExampleRef]]):
    """Batches of one rank; a distributed sampler, so that Lightning leaves it as it is."""

    def set_epoch(self, epoch: int) -> None:
        """Does nothing: the pass follows from the batches that are done."""


@dataclass(eq=False)
class EpochPlan(Plan):
    """Endless shuffled passes over examples that lie in blocks of files.

    Each pass shuffles the blocks, cuts them into groups and shuffles the examples of each group, so
    that a reader touches few blocks at a time. A pass is whole updates; the few examples left over
    at its end are others in the next one, and examples of less than one update are repeated.

    With ``readers`` every reader of every rank has blocks of its own, as WebDataset splits shards
    by node and worker: each block is read once a pass.
    """

    blocks: NDArray[np.integer]
    """``(N,)`` block number of every example."""
    _: KW_ONLY
    batch_size: int
    """Examples per batch and rank."""
    seed: int
    numbers: NDArray[np.integer] | None = None
    """``(N,)`` number of every example in its dataset; counted from 0 by default."""
    rank: int = 0
    world_size: int = 1
    accumulate: int = 1
    """Batches of each rank that make an update."""
    readers: int = 0
    """Processes of each rank that get its batches in turn and read blocks of their own; 0 where it
    does not matter who reads what."""
    blocks_per_group: int = 64
    """Blocks whose examples are mixed."""
    lengths: NDArray[np.integer] | None = None
    """``(N,)`` length of every example, to put similar ones into one batch; batches are mixed at
    random by default."""
    batches_done: Callable[[], int] = lambda: 0
    """Asked at each start of iteration: batches of each rank since the beginning of training."""

    def __post_init__(self) -> None:
        updates = len(self.blocks) // (self.batch_size * self.world_size * self.accumulate)
        self._length = max(1, updates) * self.accumulate
        self._pass: tuple[int, list[NDArray[np.int64]]] | None = None

    def __len__(self) -> int:
        """Batches of one pass and rank."""
        return self._length

    def __iter__(self) -> Iterator[list[ExampleRef]]:
        """One pass worth of batches, from where training stands."""
        first = self.batches_done()
        for number in range(first, first + len(self)):
            yield self.batch(number)

    def batch(self, number: int) -> list[ExampleRef]:
        """This rank's batch ``number``, counted from the beginning of training."""
        epoch, offset = divmod(number, len(self))
        chosen: NDArray[np.integer] = self.batches(epoch)[offset * self.world_size + self.rank]
        if self.numbers is not None:
            chosen = self.numbers[chosen]
        return [ExampleRef(number, epoch) for number in chosen.tolist()]

    def batches(self, epoch: int) -> list[NDArray[np.int64]]:
        """Positions in ``blocks`` of every batch of one pass, those of all ranks in turn."""
        if self._pass is None or self._pass[0] != epoch:
            count = len(self) * self.world_size
            readers = self._batches_by_reader()
            # So many examples that no reader gets fewer than its batches hold, if there are enough.
            ends = np.cumsum([len(batches) for batches in readers]) * len(self.blocks) // count
            rng = np.random.default_rng([self.seed, epoch])
            order = self._shuffled(ends, rng)
            found: list[NDArray[np.int64]] = [order] * count
            first = 0
            for batches, end in zip(readers, ends.tolist(), strict=True):
                # A reader without an example (there are fewer than readers) repeats another's.
                part = order[first:end] if end > first else order[:1]
                for number, batch in zip(batches, self._cut(part, len(batches), rng), strict=True):
                    found[number] = batch
                first = end
            self._pass = (epoch, found)
        return self._pass[1]

    def _batches_by_reader(self) -> list[range]:
        """Numbers of the batches of a pass that each reader of each rank gets."""
        count = len(self) * self.world_size
        if not self.readers:
            return [range(count)]
        stride = self.world_size * self.readers
        return [
            range(rank + reader * self.world_size, count, stride)
            for rank in range(self.world_size)
            for reader in range(self.readers)
            if rank + reader * self.world_size < count
        ]

    def _shuffled(self, ends: NDArray[np.integer], rng: np.random.Generator) -> NDArray[np.int64]:
        """Positions in ``blocks`` in the order of one pass; readers change at ``ends``."""
        key = rng.random(len(self.blocks))
        names, block = np.unique(self.blocks, return_inverse=True)
        place = rng.permutation(len(names))[block]
        by_block = np.lexsort((key, place))
        reader = np.empty(len(by_block), dtype=np.int64)
        reader[by_block] = np.searchsorted(ends, np.arange(len(by_block)), side="right")
        # A reader begins with a group of its own, though it may share its first block.
        starts = place[by_block[np.concatenate([[0], ends[:-1]]).clip(max=len(by_block) - 1)]]
        group = (place - starts[reader]) // self.blocks_per_group + reader * len(names)
        return np.lexsort((key, group))

    def _cut(
        self, order: NDArray[np.int64], count: int, rng: np.random.Generator
    ) -> NDArray[np.int64]:
        """``(count, batch_size)`` of shuffled examples; too few are repeated."""
        order = order[: count * self.batch_size]
        if self.lengths is not None:
            self._group_by_length(order, rng)
        return np.resize(order, (count, self.batch_size))

    def _group_by_length(self, order: NDArray[np.int64], rng: np.random.Generator) -> None:
        """Sorts runs of batches by length, and shuffles the batches of each run, in place."""
        assert self.lengths is not None
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
