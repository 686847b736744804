"""CUDA graphs: all launches of a function, recorded once and then replayed as one.

A launch takes a host 5 to 40 microseconds, and a step of a decode has a thousand of them. A replay
runs the same kernels on the same addresses and none of the Python: the function must read nothing
on the host, and its inputs must stay in their place.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

import torch

T = TypeVar("T")
logger = logging.getLogger(__name__)

RECORDED_USE = 3
"""The call of a key that is recorded; those before it prepare libraries and make buffers."""
MOST_GRAPHS = 48
"""Graphs of one decode; each holds some megabytes of descriptions of its kernels."""


@cache
def explain_eager(reason: str) -> None:
    """Says, once in a process, why decodes launch each operation of a step."""
    logger.warning("no CUDA graphs, as %s: steps run eagerly", reason)


def runs_graphs(device: torch.device) -> bool:
    """Whether a device has graphs at all."""
    return device.type == "cuda"


class CudaGraph:
    """One recorded function; those that never run at the same time may share a ``pool``."""

    def __init__(self, pool: Any) -> None:
        self._graph, self.pool = torch.cuda.CUDAGraph(), pool or torch.cuda.graph_pool_handle()

    def record(self, call: Callable[[], T]) -> T:
        """Records the launches of a call, which are not run; returns where their results will be.

        Raises ``RuntimeError`` for what no graph can hold, such as a read on the host.
        """
        # Of this thread only: loaders pin memory in others meanwhile.
        mode = "thread_local"
        stream = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(self._graph, pool=self.pool, capture_error_mode=mode):
                return call()
        except RuntimeError:
            # The end of a recording that a host read has broken raises halfway: torch's own stream
            # stays current, and the allocator refuses from then on to empty its cache.
            torch.cuda.set_stream(stream)
            with suppress(RuntimeError):  # it has ended
                torch._C._cuda_endAllocateToPool(stream.device_index, self.pool)
                torch._C._cuda_releasePool(stream.device_index, self.pool)
            raise

    def replay(self) -> None:
        self._graph.replay()


class Graphs:
    """The graphs of one decode, by what their shapes depend on; a result lasts until the next."""

    def __init__(self, what: str) -> None:
        """Sets what the log calls the recorded functions, should they have to run eagerly."""
        self._what = what
        self._is_on = True
        self._uses: Counter[Hashable] = Counter()
        self.forget()

    def forget(self) -> None:
        """Drops all graphs, because tensors that they read have moved."""
        self._recorded: dict[Hashable, tuple[CudaGraph, Any]] = {}
        self._pool: Any = None

    def run(self, key: Hashable, call: Callable[[], T]) -> T:
        """Runs a function, as a graph from its third call with a key on."""
        self._uses[key] += 1
        if key not in self._recorded:
            is_due = self._uses[key] >= RECORDED_USE and len(self._recorded) < MOST_GRAPHS
            if not (self._is_on and is_due and self._record(key, call)):
                return call()
        graph, results = self._recorded[key]
        graph.replay()
        found: T = results
        return found

    def _record(self, key: Hashable, call: Callable[[], Any]) -> bool:
        graph = CudaGraph(self._pool)
        self._pool = graph.pool
        try:
            self._recorded[key] = graph, graph.record(call)
        except RuntimeError as error:  # out of memory, too
            # Nothing has been run or written: the caller takes the step eagerly. It may need the
            # memory of all graphs, also of this one, which this frame and the error still hold.
            self._is_on = False
            self.forget()
            # At its end, a recording that has failed raises once more, and says only that.
            reason = str(error.__context__ or error).partition("\n")[0]
            logger.warning("%s: no CUDA graph, so steps run eagerly (%s)", self._what, reason)
            return False
        return True
