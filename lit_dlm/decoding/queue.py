"""Prompts that wait for a free slot in a batch, on one process or shared by several.

Every process asks for the next prompts when rows of its batch end, so that none is idle while
another has work left. Which process decodes a prompt changes neither its noise nor its result.
"""

from __future__ import annotations

from itertools import count

import torch.distributed as dist

from lit_dlm.decoding.observers import QueueObserver
from lit_dlm.decoding.state import DecodeResult, DecodeState, StepRecord

_names = count()


class WorkQueue:
    """The numbers from 0 on, each handed out once; to one process alone or to all of a run.

    Shared, it is a counter in the store of the process group, which answers while the processes
    compute. All of them must make their shared queues in the same order.
    """

    def __init__(self, size: int, *, shared: bool = False) -> None:
        self.size = size
        self.num_processes = dist.get_world_size() if shared and dist.is_initialized() else 1
        self._taken = 0
        self._reserved: list[int] = []
        self._store: dist.Store | None = None
        if self.num_processes > 1:
            # The one store that every process group has; torch gives it no public name.
            self._store = dist.distributed_c10d._get_default_store()
            self._name = f"lit_dlm/queue/{next(_names)}"

    def take(self, number: int) -> list[int]:
        """The next numbers: as many as asked for, fewer or none at the end."""
        if self._reserved:
            found, self._reserved = self._reserved, []
            return found
        if self._store is None:
            self._taken += number
            end = self._taken
        else:
            end = self._store.add(self._name, number)
        return list(range(min(end - number, self.size), min(end, self.size)))

    def reserve(self, number: int) -> bool:
        """Takes what the next call of :meth:`take` will give."""
        self._reserved = self.take(number)
        return bool(self._reserved)

    def slots(self, most: int) -> int:
        """Rows that a process should decode together, so that each has its share of the first."""
        return max(min(most, -(-self.size // self.num_processes)), 1)


class Occupancy(QueueObserver):
    """Observer that counts how many slots of a batch are at work in every step."""

    requires: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.slot_steps = 0
        """Steps of the batches watched, times their slots."""
        self.row_steps = 0
        """Steps of their rows."""
        self._num_slots = 0

    def on_start(self, state: DecodeState) -> None:
        self._num_slots = len(state.rows)

    def on_step(self, record: StepRecord) -> None:
        self.slot_steps += self._num_slots
        self.row_steps += len(record.state.rows)

    def on_refill(self, result: DecodeResult, state: DecodeState) -> None:
        """Nothing changes."""

    def on_end(self, result: DecodeResult) -> None:
        """Nothing is left to do."""

    @property
    def share(self) -> float:
        """Part of the slots that were at work, in (0, 1]; 0 before the first step."""
        return self.row_steps / max(self.slot_steps, 1)
