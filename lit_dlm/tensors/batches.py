"""Batches that move as one, and undoing the right shift: row ``i`` predicts token ``i``.

Dream-like models inherit next-token prediction from an autoregressive parent: their raw row
``i - 1`` predicts token ``i`` (Dream, arXiv:2508.15487, section on the shift operation). Everything
outside the backbones sees aligned rows only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class TensorBatch:
    """A dataclass whose tensors, including those of batches in it, move together."""

    def to(self, device: torch.device | str) -> Self:
        """Returns a copy on a device; the host does not wait if the memory is pinned."""
        is_cuda = torch.device(device).type == "cuda"
        return self._each(lambda value: value.to(device, non_blocking=is_cuda))

    def pin_memory(self) -> Self:
        return self._each(lambda value: value.pin_memory())

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        moved: dict[str, Tensor | TensorBatch] = {}
        for one in fields(self):  # type: ignore[arg-type]
            value = getattr(self, one.name)
            if isinstance(value, TensorBatch):
                moved[one.name] = value._each(change)
            elif isinstance(value, Tensor):
                moved[one.name] = change(value)
        return replace(self, **moved)  # type: ignore[type-var]


def token_batches(sizes: NDArray[np.integer], max_tokens: int) -> list[NDArray[np.int64]]:
    """Returns the row numbers of each batch: rows of similar length, as many as fit.

    ``sizes`` ``(N, 2)`` are tokens of prompt and response. A batch pads each part to its longest
    one, so ``n`` rows take ``n`` times the sum of these; a row above ``max_tokens`` is alone.
    """
    totals = sizes.sum(1)
    most = max(1, max_tokens // max(1, int(totals.min(initial=max_tokens))))
    # Rows must be alike in both parts: they form bands by the part that varies most, as many bands
    # as each has batches, and are sorted in a band by the other part, up or down in turn.
    major = int(sizes.std(axis=0).argmax())
    by_major = np.argsort(sizes[:, major], kind="stable")
    num_bands = max(1, round((totals.sum() / max_tokens) ** 0.5))
    band = np.empty(len(sizes), dtype=np.int64)
    band[by_major] = totals[by_major].cumsum() * num_bands // (totals.sum() + 1)
    minor = np.where(band % 2 == 0, 1, -1) * sizes[:, 1 - major]
    order = np.lexsort((sizes[:, major], minor, band))
    batches = []
    first = 0
    while first < len(order):
        padded = np.maximum.accumulate(sizes[order[first : first + most]]).sum(1)
        fitting = int((padded * np.arange(1, len(padded) + 1) <= max_tokens).sum())
        batches.append(order[first : first + max(1, fitting)])
        first += max(1, fitting)
    return batches


FREE_READS = frozenset({"cpu"})
"""Types of devices whose values the host reads without waiting."""


def reads_are_free(device: torch.device) -> bool:
    """Whether the host may read a value of a device without waiting for work to end.

    On a CPU, a question that saves work is worth asking. A GPU would run dry meanwhile.
    """
    return device.type in FREE_READS


class DeviceTable:
    """Numbers that steps look up, uploaded once to every device that asks for them.

    A CUDA graph cannot upload them, and reads them where they were when it was captured.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._copies: dict[torch.device, Tensor] = {}

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Tensor) -> Tensor:
        """Returns the entries at ``(...)`` int64 indices, on their device."""
        if index.device not in self._copies:
            self._copies[index.device] = self._values.to(index.device)
        return self._copies[index.device][index]


def row_index(rows: Sequence[int], device: torch.device) -> Tensor:
    """``(n,)`` int64: row numbers moved to a device, without the host waiting."""
    return torch.tensor(rows, dtype=torch.long).to(device, non_blocking=True)


def gather_rows(rows: Tensor, columns: Tensor) -> Tensor:
    """``(B, K, D)``: the rows ``(B, L, D)`` at ``(B, K)`` int64 columns."""
    return rows.gather(1, columns.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))


def shifted(values: Tensor, by: int, fill: int = 0) -> Tensor:
    """``(B, L + by, ...)``: columns of ``fill`` added on the left, or removed if ``by`` < 0."""
    if by < 0:
        return values[:, -by:].contiguous()
    new = values.new_full((values.shape[0], by, *values.shape[2:]), fill)
    return torch.cat([new, values], dim=1)
