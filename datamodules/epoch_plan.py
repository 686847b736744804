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

_Batches = NDArray[np.int64] | list[NDArray[np.int64]]


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
        self.accumulate = accumulate
        self.blocks_per_group = blocks_per_group
        self.batches_done = batches_done
        self._pass: tuple[int, _Batches] | None = None
        self._count = (
            len(self.blocks) // batch_size if max_tokens is None else len(self._token_batches(0))
        )

    def __len__(self) -> int:
        """Batches of one pass and rank."""
        return max(1, self._count // (self.world_size * self.accumulate)) * self.accumulate

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

    def batches(self, epoch: int) -> _Batches:
        """Places in ``blocks`` of every batch of one pass, those of all ranks in turn.

        Too few examples for an update are repeated.
        """
        if self._pass is None or self._pass[0] != epoch:
            count = len(self) * self.world_size
            if self.max_tokens is None:
                order = self.order(epoch)[: count * self.batch_size]
                found: _Batches = np.resize(order, count * self.batch_size).reshape(
                    count, self.batch_size
                )
            else:
                cut = split_batches(self._token_batches(epoch), count)
                found = [cut[number % len(cut)] for number in range(count)]
            self._pass = (epoch, found)
        return self._pass[1]

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Places in ``blocks`` in the order of one pass."""
        order, rng = self._shuffled(epoch)
        if self.lengths is not None and self.max_tokens is None:
            self._group_by_length(order[: len(self) * self.batch_size * self.world_size], rng)
        return order

    def _shuffled(self, epoch: int) -> tuple[NDArray[np.int64], np.random.Generator]:
        rng = np.random.default_rng([self.seed, epoch])
        names = np.unique(self.blocks)
        # Small integers: there may be many millions of examples.
        groups = (rng.permutation(len(names)) // self.blocks_per_group).astype(np.int32)
        group = groups[np.searchsorted(names, self.blocks)]
        return np.lexsort((rng.random(len(self.blocks)), group)), rng

    def _token_batches(self, epoch: int) -> list[NDArray[np.int64]]:
        """Batches of one pass, made of runs of the shuffled examples and shuffled within them."""
        assert self.lengths is not None
        assert self.max_tokens is not None
        order, rng = self._shuffled(epoch)
        last_token = self.lengths[order].sum(1).cumsum() - 1
        runs = np.flatnonzero(np.diff(last_token // (_LENGTH_GROUP * self.max_tokens))) + 1
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
