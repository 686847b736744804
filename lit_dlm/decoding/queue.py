"""Prompts that wait for a free slot in a batch, on one process or shared by several.

Every process asks for the next prompts when rows of its batch end, so that none is idle while
another has work left. Which process decodes a prompt changes neither its noise nor its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lit_dlm.backbones.base import Backbone
from lit_dlm.decoding.decoder import Decoder
from lit_dlm.decoding.engine import NotANumberError
from lit_dlm.decoding.observers import QueueObserver
from lit_dlm.decoding.state import (
    Canvas,
    DecodeResult,
    DecodeState,
    StepRecord,
    prompt_canvas,
)
from lit_dlm.ops.alignment import shifted

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


def decode_queued_prompts(
    backbone: Backbone,
    decoder: Decoder,
    queue: WorkQueue,
    prompt: Callable[[int], tuple[Sequence[int], int]],
    *,
    response_length: int,
    num_slots: int,
    observers: Sequence[QueueObserver] = (),
) -> Iterator[tuple[list[int], DecodeResult]]:
    """Decodes what this process takes from a queue; a row that ends is replaced by the next prompt.

    Prompts should come in descending order of length: the canvas then shrinks with them. Yields
    numbers of prompts and their results in the same order.

    Args:
        prompt: token ids and seed of a number.
    """
    number_at: dict[int, int] = {}
    waiting: list[int] = []
    begun: dict[int, Sequence[int]] = {}
    vision = getattr(backbone, "vision", None)

    def source(slots: int) -> Canvas | None:
        taken = queue.take(slots)
        if not taken:
            return None
        if number_at:
            waiting.extend(taken)
        else:
            number_at.update(enumerate(taken))
        chosen = [prompt(number) for number in taken]
        if vision is not None:
            begun.update(zip(taken, [ids for ids, _ in chosen], strict=True))
        return prompt_canvas(
            [ids for ids, _ in chosen],
            response_length=response_length,
            spec=backbone.spec,
            seeds=[seed for _, seed in chosen],
            device=getattr(backbone, "device", "cpu"),
        )

    results = decoder.queue(backbone, source, num_slots=queue.slots(num_slots), observers=observers)
    try:
        for result in results:
            numbers = [number_at[slot] for slot in result.rows]
            number_at.update(zip(result.rows, waiting, strict=False))
            waiting.clear()
            if vision is not None:
                for number in numbers:
                    vision.release(begun.pop(number))
            yield numbers, result
    except NotANumberError as error:
        error.rows = [number_at[slot] for slot in error.rows]
        raise


def joined_results(results: Sequence[DecodeResult], *, pad_id: int) -> DecodeResult:
    """Results one behind the other, left-padded to the longest prompts among them."""
    last, start = results[-1], max(result.start for result in results)

    def columns(values: Callable[[DecodeResult], Tensor], fill: int) -> Tensor:
        return torch.cat([shifted(values(one), start - one.start, fill) for one in results])

    def given(one: DecodeResult) -> Tensor:
        in_prompt = torch.arange(one.ids.shape[1], device=one.ids.device) < one.start
        return in_prompt.expand_as(one.ids) if one.given is None else one.given

    tensors: dict[str, Any] = {
        name: torch.cat([getattr(result, name) for result in results])
        for name, value in vars(last).items()
        if isinstance(value, Tensor) and name not in ("ids", "given")
    }
    has_given = any(one.given is not None for one in results)
    return replace(
        last,
        ids=columns(lambda one: one.ids, pad_id),
        given=columns(given, 1) if has_given else None,
        start=start,
        rows=[row for one in results for row in one.rows],
        status=[status for one in results for status in one.status],
        **tensors,
    )


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
