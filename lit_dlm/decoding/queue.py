"""Prompts that wait for a free place in a batch, on one process or shared by several.

Every process asks for the next prompts when rows of its batch end, so that none is idle while
another has work left. Which process decodes a prompt changes neither its noise nor its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count

import torch.distributed as dist

from lit_dlm.backbones.base import Backbone
from lit_dlm.decoding.decoder import Decoder
from lit_dlm.decoding.observers import QueueObserver
from lit_dlm.decoding.state import (
    Canvas,
    DecodeResult,
    DecodeState,
    StepRecord,
    prompt_canvas,
)

_names = count()


class WorkQueue:
    """The numbers from 0 on, each handed out once; to one process alone or to all of a run.

    Shared, it is a counter in the store of the process group, which answers while the processes
    compute. All of them must make their shared queues in the same order.

    Args:
        size: how many there are.
        shared: between all processes, where there are several.
    """

    def __init__(self, size: int, *, shared: bool = False) -> None:
        self.size = size
        self.num_processes = dist.get_world_size() if shared and dist.is_initialized() else 1
        self._taken = 0
        self._store: dist.Store | None = None
        if self.num_processes > 1:
            # The one store that every process group has; torch gives it no public name.
            self._store = dist.distributed_c10d._get_default_store()
            self._name = f"lit_dlm/queue/{next(_names)}"

    def take(self, number: int) -> list[int]:
        """The next numbers: as many as asked for, fewer or none at the end.

        Args:
            number: how many.
        """
        if self._store is None:
            self._taken += number
            end = self._taken
        else:
            end = self._store.add(self._name, number)
        return list(range(min(end - number, self.size), min(end, self.size)))


def decode_queued_prompts(
    backbone: Backbone,
    decoder: Decoder,
    queue: WorkQueue,
    prompt: Callable[[int], tuple[Sequence[int], int]],
    *,
    response_length: int,
    num_places: int,
    observers: Sequence[QueueObserver] = (),
) -> Iterator[tuple[list[int], DecodeResult]]:
    """Decodes what this process takes from a queue; a row that ends is replaced by the next prompt.

    Prompts should come in descending order of length: the canvas then shrinks with them.

    Args:
        backbone: the denoiser.
        decoder: the method.
        queue: numbers of prompts.
        prompt: token ids and seed of a number.
        response_length: cells to fill behind each.
        num_places: rows decoded together; fewer where the queue has fewer for each process.
        observers: read-only callbacks.

    Yields:
        Numbers of prompts, and their results in the same order.

    Raises:
        ValueError: see :func:`~lit_dlm.decoding.state.prompt_canvas` and :class:`Decoder`.
    """
    number_at: dict[int, int] = {}
    waiting: list[int] = []

    def source(places: int) -> Canvas | None:
        taken = queue.take(places)
        if not taken:
            return None
        if number_at:
            waiting.extend(taken)
        else:
            number_at.update(enumerate(taken))
        chosen = [prompt(number) for number in taken]
        return prompt_canvas(
            [ids for ids, _ in chosen],
            response_length=response_length,
            spec=backbone.spec,
            seeds=[seed for _, seed in chosen],
            device=getattr(backbone, "device", "cpu"),
        )

    share = -(-queue.size // queue.num_processes)
    results = decoder.queue(
        backbone, source, num_places=max(min(num_places, share), 1), observers=observers
    )
    for result in results:
        numbers = [number_at[place] for place in result.rows]
        number_at.update(zip(result.rows, waiting, strict=False))
        waiting.clear()
        yield numbers, result


class Occupancy(QueueObserver):
    """Observer that counts how many places of a batch are at work in every step."""

    requires: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.place_steps = 0
        """Steps of the batches watched, times their places."""
        self.row_steps = 0
        """Steps of their rows."""
        self._num_places = 0

    def on_start(self, state: DecodeState) -> None:
        """Counts the places."""
        self._num_places = len(state.rows)

    def on_step(self, record: StepRecord) -> None:
        """Counts a step."""
        self.place_steps += self._num_places
        self.row_steps += len(record.state.rows)

    def on_refill(self, result: DecodeResult, state: DecodeState) -> None:
        """Nothing changes."""

    def on_end(self, result: DecodeResult) -> None:
        """Nothing is left to do."""

    @property
    def share(self) -> float:
        """Part of the places that were at work, in (0, 1]; 0 before the first step."""
        return self.row_steps / max(self.place_steps, 1)
