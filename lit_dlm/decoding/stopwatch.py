"""Times a part of a step without waiting for the device."""

from __future__ import annotations

import time

import torch


class Span:
    """Seconds between entering and leaving a ``with`` block.

    On a CPU a clock; on CUDA two events in the stream, so that what is timed is the work and not
    its launch, and nothing waits before :meth:`seconds` is asked.
    """

    def __init__(self, device: torch.device) -> None:
        """Sets the device that does the work."""
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = (
                torch.cuda.Event(enable_timing=True),
                torch.cuda.Event(enable_timing=True),
            )
        self._clock = 0.0

    def __enter__(self) -> Span:
        if self._events is not None:
            self._events[0].record()
        self._clock = time.perf_counter()
        return self

    def __exit__(self, *exception: object) -> None:
        self._clock = time.perf_counter() - self._clock
        if self._events is not None:
            self._events[1].record()

    def seconds(self) -> float:
        """The time; on CUDA this waits for the end of the block."""
        if self._events is None:
            return self._clock
        start, end = self._events
        end.synchronize()
        return start.elapsed_time(end) / 1e3
