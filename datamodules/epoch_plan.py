"""Which examples go into which batch: pure functions of seed, batch number and rank.

A plan yields batches of example references. Because batch ``n`` can be computed without the ones
before it, a resumed run starts at the batch it stopped at, and replays or skips nothing. Both
plans are distributed samplers of their own, so that Lightning leaves them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler

from lit_dlm.ops.batches import split_batches, token_batches
from lit_dlm.ops.options import at_least

_LENGTH_GROUP = 50
"""Batches whose examples are sorted by length together; as many times ``max_tokens``."""


class ExampleRef(NamedTuple):
    """One slot of a batch."""

    number: int
    """Number of the example."""
    epoch: int
    """Pass over the data; examples with a random part differ from pass to pass."""
    is_real: bool = True
    """``False`` on a copy that only fills a batch."""


class EpochPlan(DistributedSampler[list[ExampleRef]]):
    """Endless shuffled passes over examples that lie in blocks of files.

    Each pass shuffles the blocks, cuts them into groups and shuffles the examples of each group, so
    that a reader touches few blocks at a time. A pass is whole updates, so it is the same for any
    number of ranks that share an update; the few examples left over at its end are others in the
    next one, and examples of less than one update are repeated.

    With ``readers`` every reader of every rank has blocks of its own, as WebDataset splits shards
    by node and worker: each block is read once a pass, and the order depends on the numbers of
    ranks and readers.

    With ``max_tokens`` batches hold as many examples as fit, sorted by length. Every pass has as
    many of them as the first: one more is left over, of one less the largest are cut in two.
    """

    def __init__(
        self,
        blocks: Sequence[int] | NDArray[np.integer],
        *,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        readers: int = 0,
        accumulate: int = 1,
        blocks_per_group: int = 64,
        numbers: Sequence[int] | NDArray[np.integer] | None = None,
        lengths: Sequence[int] | NDArray[np.integer] | None = None,
        max_tokens: int | None = None,
        batches_done: Callable[[], int] = lambda: 0,
    ) -> None:
        """Sets up the plan.

        Args:
            blocks: block number of every example.
            batch_size: examples per batch and rank; not read with ``max_tokens``.
            seed: seed of the shuffles.
            rank: global rank.
            world_size: number of processes.
            readers: processes of each rank that get its batches in turn and read blocks of their
                own; 0 where it does not matter who reads what.
            accumulate: batches of each rank that make an update.
            blocks_per_group: blocks whose examples are mixed.
            numbers: number of every example in its dataset; counted from 0 by default.
            lengths: length of every example, to put similar ones into one batch; batches are mixed
                at random by default. A pass holds the same examples either way. With
                ``max_tokens`` ``(number of examples, parts)``, see
                :func:`~lit_dlm.ops.batches.token_batches`.
            max_tokens: most tokens of a batch of one rank, padding included.
            batches_done: asked at each start of iteration: batches that each rank has consumed
                since the beginning of training.
        """
        if not len(blocks):
            raise ValueError("EpochPlan: expected at least one example, got none")
        at_least(1, batch_size=batch_size)
        self.blocks = np.asarray(blocks)
        self.numbers = None if numbers is None else np.asarray(numbers)
        if self.numbers is not None and len(self.numbers) != len(self.blocks):
            raise ValueError(
                f"EpochPlan: expected {len(self.blocks)} numbers like blocks, "
                f"got {len(self.numbers)}"
            )
        self.lengths = None if lengths is None else np.asarray(lengths)
        if max_tokens is not None:
            assert self.lengths is not None
            longest = int(self.lengths.sum(1).max())
            if max_tokens < longest:
                raise ValueError(
                    f"max_tokens_per_batch: expected at least {longest}, the tokens of the longest "
                    f"example, got {max_tokens}"
                )
        self.max_tokens = max_tokens
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.readers = readers
        self.accumulate = accumulate
        self.blocks_per_group = blocks_per_group
        self.batches_done = batches_done
        self._pass: tuple[int, list[NDArray[np.int64]]] | None = None
        count = len(self.blocks) // batch_size
        if max_tokens is not None:
            order, group, rng = self._shuffled(0, np.array([len(self.blocks)]))
            count = len(self._token_batches(order, group, rng))
        self._length = max(1, count // (world_size * accumulate)) * accumulate

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
        chosen = self.batches(epoch)[offset * self.world_size + self.rank]
        if self.numbers is not None:
            chosen = self.numbers[chosen]
        return [ExampleRef(number, epoch) for number in chosen.tolist()]

    def batches(self, epoch: int) -> list[NDArray[np.int64]]:
        """Places in ``blocks`` of every batch of one pass, those of all ranks in turn.

        Too few examples for an update are repeated.
        """
        if self._pass is None or self._pass[0] != epoch:
            lanes = self._lanes()
            # So many examples that no lane gets fewer than its batches hold, if there are enough.
            ends = np.cumsum([len(lane) for lane in lanes]) * len(self.blocks)
            order, group, rng = self._shuffled(epoch, ends // (len(self) * self.world_size))
            found: list[NDArray[np.int64]] = [order] * (len(self) * self.world_size)
            first = 0
            for lane, end in zip(lanes, (ends // len(found)).tolist(), strict=True):
                # A lane without an example (there are fewer than lanes) repeats another's.
                part = slice(first, end) if end > first else slice(0, 1)
                cut = self._cut(order[part], group[part], len(lane), rng)
                for number, place in enumerate(lane):
                    found[place] = cut[number % len(cut)]
                first = end
            self._pass = (epoch, found)
        return self._pass[1]

    def _lanes(self) -> list[range]:
        """Batches of a pass that one reader gets, for every reader of every rank."""
        count = len(self) * self.world_size
        if not self.readers:
            return [range(count)]
        stride = self.world_size * self.readers
        firsts = [
            rank + reader * self.world_size
            for rank in range(self.world_size)
            for reader in range(self.readers)
        ]
        return [range(first, count, stride) for first in firsts if first < count]

    def _shuffled(
        self, epoch: int, ends: NDArray[np.integer]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], np.random.Generator]:
        """Places in ``blocks`` in the order of one pass, cut at ``ends``; the group of each."""
        rng = np.random.default_rng([self.seed, epoch])
        key = rng.random(len(self.blocks))
        names, block = np.unique(self.blocks, return_inverse=True)
        place = rng.permutation(len(names))[block]
        by_block = np.lexsort((key, place))
        lane = np.empty(len(by_block), dtype=np.int64)
        lane[by_block] = np.searchsorted(ends, np.arange(len(by_block)), side="right")
        # A lane begins with a group of its own, though it may share its first block.
        starts = place[by_block[np.concatenate([[0], ends[:-1]]).clip(max=len(by_block) - 1)]]
        group = (place - starts[lane]) // self.blocks_per_group + lane * len(names)
        order = np.lexsort((key, group))
        return order, group[order], rng

    def _cut(
        self,
        order: NDArray[np.int64],
        group: NDArray[np.int64],
        count: int,
        rng: np.random.Generator,
    ) -> Sequence[NDArray[np.int64]]:
        """So many batches of shuffled examples."""
        if self.max_tokens is not None:
            return split_batches(self._token_batches(order, group, rng), count)
        order = order[: count * self.batch_size]
        if self.lengths is not None:
            self._group_by_length(order, rng)
        return list(np.resize(order, count * self.batch_size).reshape(count, self.batch_size))

    def _token_batches(
        self, order: NDArray[np.int64], group: NDArray[np.int64], rng: np.random.Generator
    ) -> list[NDArray[np.int64]]:
        """Batches made of runs of the shuffled examples of a group, and shuffled within them."""
        assert self.lengths is not None
        assert self.max_tokens is not None
        last_token = self.lengths[order].sum(1).cumsum() - 1
        run_of = last_token // (_LENGTH_GROUP * self.max_tokens)
        runs = np.flatnonzero(np.diff(run_of) | np.diff(group)) + 1
        found = []
        for run in np.split(order, runs):
            batches = token_batches(self.lengths[run], self.max_tokens)
            found += [run[batches[number]] for number in rng.permutation(len(batches))]
        return found

    def _group_by_length(self, order: NDArray[np.int64], rng: np.random.Generator) -> None:
        """Sorts runs of batches by length, and shuffles the batches of each run, in place."""
        assert self.lengths is not None
        whole = len(order) // self.batch_size * self.batch_size
        for first in range(0, whole, _LENGTH_GROUP * self.batch_size):
            run = order[first : min(first + _LENGTH_GROUP * self.batch_size, whole)]
            by_length = run[np.argsort(self.lengths[run], kind="stable")]
            run[:] = rng.permutation(by_length.reshape(-1, self.batch_size)).ravel()

    def set_epoch(self, epoch: int) -> None:
        """Does nothing: the pass follows from the batches that are done."""
        del epoch


class FixedPlan(DistributedSampler[list[ExampleRef]]):
    """One pass over given examples in order, dealt out evenly; copies fill the last batches."""

    def __init__(
        self,
        indices: Sequence[int] | NDArray[np.integer],
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Sets up the plan.

        Args:
            indices: examples of all ranks.
            batch_size: examples per batch and rank.
            rank: global rank.
            world_size: number of processes.
        """
        if not len(indices):
            raise ValueError("FixedPlan: expected at least one example, got none")
        at_least(1, batch_size=batch_size)
        per_rank = -(-len(indices) // world_size)
        self.batches = []
        for first in range(0, per_rank, batch_size):
            slots = range(first, min(first + batch_size, per_rank))
            positions = [slot * world_size + rank for slot in slots]
            self.batches.append(
                [
                    ExampleRef(int(indices[at % len(indices)]), 0, at < len(indices))
                    for at in positions
                ]
            )

    def __len__(self) -> int:
        """Batches per rank, the same on every rank."""
        return len(self.batches)

    def __iter__(self) -> Iterator[list[ExampleRef]]:
        """The batches of this rank."""
        return iter(self.batches)

    def set_epoch(self, epoch: int) -> None:
        """Does nothing: the order is fixed."""
        del epoch
