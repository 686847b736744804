"""Forwards that a GPU replays as CUDA graphs: one launch in place of a thousand.

A small batch waits for launches, not for arithmetic. A forward whose shapes have been seen before
is recorded once, with its inputs in buffers of its own, and then replayed: the same kernels in the
same order on the same addresses, hence the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

import torch
from torch import Tensor

Replay = Callable[[], object]


class Capture(Protocol):
    """Records work on a device; one serves all graphs of a decode, which share their memory."""

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        """Records.

        Args:
            work: reads and writes tensors that exist, without a look at their values.

        Returns:
            What the work returned, and what runs it again into the same memory.
        """
        ...


class CudaCapture:
    """Records a stream of CUDA."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        """See :class:`Capture`; other threads may go on using the device."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = work()
        return output, graph.replay


CAPTURES: dict[str, Callable[[], Capture]] = {"cuda": CudaCapture}
"""By type of device."""


class Graphs:
    """The forwards of one decode that are replayed.

    Args:
        device: of the model.

    Raises:
        ValueError: the device has no graphs, or autocast is on, whose copies of weights a graph
            would outlive.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type not in CAPTURES:
            raise ValueError(
                "compile: 'cuda_graphs' needs a model on a GPU, but this one is on "
                f"{device.type}; leave it out"
            )
        kind = device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            raise ValueError(
                "compile: 'cuda_graphs' does not go with autocast (mixed precision); give the "
                "model its dtype, as in precision bf16-true"
            )
        self._device = device
        self._capture = CAPTURES[device.type]()
        self._known: dict[Hashable, tuple[list[Tensor], Tensor, Replay] | None] = {}

    def clear(self) -> None:
        """Forgets all graphs: tensors that they read or write have moved."""
        self._known.clear()

    def run(self, key: Hashable, work: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Runs some work, from its third time on as a graph.

        Args:
            key: equal where the work is the same but for its inputs.
            work: a function of the inputs that may also read and write tensors which stay where
                they are.
            inputs: on the device, or on the CPU and then taken there.

        Returns:
            What the work returns; the next run of the same key writes over it.
        """
        key = key, *(tensor.shape for tensor in inputs)
        if key not in self._known:
            # The first time as it is: libraries set themselves up, and buffers get their memory.
            self._known[key] = None
            return work(*(tensor.to(self._device, non_blocking=True) for tensor in inputs))
        known = self._known[key]
        if known is None:
            buffers = [
                torch.empty_like(t, device=self._device, memory_format=torch.contiguous_format)
                for t in inputs
            ]
            _fill(buffers, inputs)
            output, replay = self._capture(lambda: work(*buffers))
            self._known[key] = known = buffers, output, replay
        buffers, output, replay = known
        _fill(buffers, inputs)
        replay()
        return output


def _fill(buffers: list[Tensor], inputs: tuple[Tensor, ...]) -> None:
    for buffer, tensor in zip(buffers, inputs, strict=True):
        buffer.copy_(tensor, non_blocking=True)
