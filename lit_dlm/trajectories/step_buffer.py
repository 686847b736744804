"""Buffers that a decode fills on its device, one row of values per step, and their way to the host.

Nothing here waits for the device while a decode runs. On CUDA a full buffer travels to pinned
memory on a stream of its own, beside the decode; on the CPU the buffer itself is handed over.

A step costs its caller one append to a list. The tensors of some steps are then copied into the
buffer by one operation: launching an operation right after a forward, with cold caches, takes far
longer than the copy itself. So a tensor that was handed in must not be written afterwards, which
holds for whatever the decode loop shows its observers.
"""

from __future__ import annotations

from functools import cache
from itertools import groupby

import torch
from torch import Tensor

MAX_CHUNK_BYTES = 64 * 2**20
"""Device memory of one buffer; longer decodes spill to the host in parts of this size."""
_STEPS_AT_ONCE = 16


class HostCopies:
    """Tensors on their way from one device to the host."""

    def __init__(self, device: torch.device) -> None:
        """Prepares copies.

        Args:
            device: where the tensors are. On the CPU nothing is copied.
        """
        self.device = device
        self._arrival: torch.cuda.Event | None = None

    def add(self, tensor: Tensor) -> Tensor:
        """Starts to copy a tensor.

        Args:
            tensor: on the device; must not be written any more.

        Returns:
            The same values on the host, valid after :meth:`wait`.
        """
        if self.device.type == "cpu":
            return tensor
        if self.device.type != "cuda":
            return tensor.cpu()
        side, now = _side_stream(self.device), torch.cuda.current_stream(self.device)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        side.wait_event(now.record_event())
        with torch.cuda.stream(side):
            host.copy_(tensor, non_blocking=True)
        # The allocator must not give this memory to the decode before the copy has read it.
        tensor.record_stream(side)
        self._arrival = side.record_event()
        return host

    def wait(self) -> None:
        """Waits until every tensor has arrived; may be called from another thread."""
        if self._arrival is not None:
            self._arrival.synchronize()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all copies from a device."""
    return torch.cuda.Stream(device)


class StepBuffer:
    """Values ``(T, B, G)`` of a decode whose number of steps is not known beforehand.

    Rows that have left the batch hold no values: what stands there is arbitrary.
    """

    def __init__(
        self,
        num_rows: int,
        num_columns: int,
        dtype: torch.dtype,
        copies: HostCopies,
        *,
        expected_steps: int,
        first_column: int = 0,
        tail: int = 0,
        max_chunk_bytes: int = MAX_CHUNK_BYTES,
    ) -> None:
        """Sets up a buffer; memory is taken at the first step.

        Args:
            num_rows: B, rows of the starting batch.
            num_columns: G.
            dtype: values are converted to it.
            copies: brings full parts to the host.
            expected_steps: most likely T; more steps take more parts.
            first_column: values of earlier columns are left out.
            tail: values that :meth:`finish` will append.
            max_chunk_bytes: largest part, unless a single step is larger.
        """
        self.num_rows, self.num_columns, self.dtype = num_rows, num_columns, dtype
        self.length = 0
        """Steps so far."""
        self._copies = copies
        self._first_column = first_column
        self._tail = tail
        step_bytes = max(num_rows * num_columns * dtype.itemsize, 1)
        self._chunk_steps = max(1, min(expected_steps, max_chunk_bytes // step_bytes))
        self._flat: Tensor | None = None
        self._steps: Tensor | None = None
        self._at = 0
        self._parts: list[Tensor] = []
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._room = min(_STEPS_AT_ONCE, self._chunk_steps)

    def append(self, rows: Tensor, values: Tensor) -> None:
        """Stores one step.

        Args:
            rows: ``(b,)`` int64, ascending: rows of the starting batch that are still there. Equal
                rows should be the same tensor.
            values: ``(b, first_column + G)``; must not be written any more.
        """
        self._waiting.append((rows, values))
        self.length += 1
        if len(self._waiting) == self._room:
            self._settle()

    def finish(self, *tail: Tensor) -> tuple[list[Tensor], Tensor]:
        """Ends the buffer and sends its rest to the host, as one piece with the tail.

        Args:
            tail: tensors to send along, as many values as announced.

        Returns:
            Parts ``(t, B, G)`` whose lengths sum to T, and the tail's values in one row; on the
            host, valid once the copies have arrived.
        """
        self._settle()
        if self._flat is None:
            self._begin(self._copies.device)
        assert self._flat is not None
        used = self._at * self.num_rows * self.num_columns
        end = used
        for tensor in tail:
            first, end = end, end + tensor.numel()
            self._flat[first:end].view(tensor.shape).copy_(tensor)
        assert end - used == self._tail, "the tail is not as long as announced"
        host = self._copies.add(self._flat[:end])
        self._parts.append(self._part(host[:used]))
        self._flat = self._steps = None
        return self._parts, host[used:]

    def _settle(self) -> None:
        """Copies the waiting steps into the buffer, which has room for them."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        if self._steps is None or self._at == self._chunk_steps:
            self._begin(waiting[0][1].device)
        assert self._steps is not None
        for _, group in groupby(waiting, key=lambda step: id(step[0])):
            same_rows = list(group)
            rows, values = same_rows[0][0], [value for _, value in same_rows]
            target = self._steps[self._at : self._at + len(values)]
            stacked = torch.stack(values)[:, :, self._first_column :]
            if stacked.shape[1] == self.num_rows:  # rows only ever leave: all are here, in order
                target.copy_(stacked)
            else:
                target.index_copy_(1, rows, stacked.to(self.dtype))
            self._at += len(values)
        self._room = min(_STEPS_AT_ONCE, self._chunk_steps - self._at) or min(
            _STEPS_AT_ONCE, self._chunk_steps
        )

    def _begin(self, device: torch.device) -> None:
        size = self.num_rows * self.num_columns
        if self._flat is not None:
            self._parts.append(self._part(self._copies.add(self._flat[: self._at * size])))
        length = self._chunk_steps * size
        self._flat = torch.empty(length + self._tail, dtype=self.dtype, device=device)
        self._steps = self._part(self._flat[:length])
        self._at = 0

    def _part(self, flat: Tensor) -> Tensor:
        if self.num_rows * self.num_columns == 0:
            return flat.view(0, self.num_rows, self.num_columns)
        return flat.view(-1, self.num_rows, self.num_columns)
