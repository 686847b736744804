"""Replay: every canvas of a decode, step by step, out of the record alone.

These are pure functions of the record; nothing is run and nothing is compared, so nothing here can
say that a model would do the same. That is :mod:`lit_dlm.trajectories.verify`.

One record is replayed with numpy (:func:`iter_steps`, :func:`selected`, and the methods of
:class:`~lit_dlm.trajectories.record.Trajectory`), many at once with torch
(:class:`BatchedReplay`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_dlm.trajectories.columns import flatten
from lit_dlm.trajectories.record import Int32, Trajectory


@dataclass(frozen=True, eq=False)
class ReplayedStep:
    """What one step wrote, and the canvas that it left."""

    step: int
    """Number of the step, from 0."""
    positions: NDArray[np.int64]
    """``(K,)`` int64 response positions that it wrote, ascending; none for an idle step."""
    tokens: Int32
    """``(K,)`` int32 what it wrote there; the mask id where it took a token back."""
    canvas: Int32
    """``(G,)`` int32 response after the step."""


def selected(record: Trajectory, step: int) -> tuple[NDArray[np.int64], Int32]:
    """What one step wrote.

    Args:
        record: the record.
        step: 0 to ``num_steps - 1``.

    Returns:
        ``(K,)`` int64 positions, ascending, and ``(K,)`` int32 tokens.

    Raises:
        ValueError: the record has no such step.
    """
    positions = record.committed_at(step)
    return positions, record.state_at(step + 1)[positions]


def iter_steps(record: Trajectory) -> Iterator[ReplayedStep]:
    """All steps in order; the canvases are those of ``record.all_states()``.

    Args:
        record: the record.

    Yields:
        One entry per executed step, idle ones included.
    """
    canvas = record.initial()
    events = record.events()
    ends = np.searchsorted(events[:, 0], np.arange(record.num_steps), side="right").tolist()
    begin = 0
    positions, tokens = events[:, 1].astype(np.int64), np.ascontiguousarray(events[:, 2])
    for step, end in enumerate(ends):
        canvas = canvas.copy()
        canvas[positions[begin:end]] = tokens[begin:end]
        yield ReplayedStep(step, positions[begin:end], tokens[begin:end], canvas)
        begin = end


class BatchedReplay:
    """The canvases of several records as padded tensors.

    Records may differ in length, steps and overwritten writes. Cells beyond a record's length hold
    the mask id, and a record that has ended keeps its last canvas.
    """

    def __init__(
        self, records: Sequence[Trajectory], *, device: torch.device | str = "cpu"
    ) -> None:
        """Moves the records to a device.

        Args:
            records: at least one; all with one mask id.
            device: where the tensors live.

        Raises:
            ValueError: there is no record, or the mask ids differ.
        """
        if not records:
            raise ValueError("BatchedReplay: expected at least one record, got none")
        masks = sorted({record.mask_id for record in records})
        if len(masks) > 1:
            raise ValueError(f"BatchedReplay: expected one mask id, got {masks}")
        self.mask_id = masks[0]
        shape = len(records), max(record.num_generated for record in records)
        tokens = np.full(shape, self.mask_id, dtype=np.int32)
        commit_step = np.full(shape, -1, dtype=np.int32)
        for row, record in enumerate(records):
            tokens[row, : record.num_generated] = record.tokens
            commit_step[row, : record.num_generated] = record.commit_step
        self.tokens = torch.from_numpy(tokens).to(device)
        """``(B, G)`` int32 final tokens."""
        self.commit_step = torch.from_numpy(commit_step).to(device)
        """``(B, G)`` int32."""
        self.num_steps = torch.tensor([record.num_steps for record in records], device=device)
        """``(B,)`` int64 executed steps."""
        self._spans = torch.from_numpy(_spans(records)).to(device)

    def states_at(self, step: int | Tensor) -> Tensor:
        """The response canvases before ``step``.

        Args:
            step: one step for all records, or ``(B,)`` integers; 0 or more.

        Returns:
            ``(B, G)`` int32.
        """
        steps = torch.as_tensor(step, dtype=torch.int32, device=self.tokens.device)
        steps = steps.expand(len(self.tokens))
        canvas = self._shown(self.commit_step - steps[:, None], self.tokens)
        row, position, token, first, last = self._spans
        if len(row):
            # At most one overwritten write stands at a position at any time.
            here = (first <= steps[row]) & (steps[row] <= last)
            canvas[row[here], position[here]] = token[here].int()
        return canvas

    def all_states(self) -> Tensor:
        """``(B, T + 1, G)`` int32 with T the most steps: ``[:, t]`` equals ``states_at(t)``."""
        num_steps = int(self.num_steps.max())
        steps = torch.arange(num_steps + 1, device=self.tokens.device, dtype=torch.int32)
        until = self.commit_step[:, None, :] - steps[:, None]
        states = self._shown(until, self.tokens[:, None, :])
        for row, position, token, first, last in self._spans.T.tolist():
            states[row, first : last + 1, position] = token
        return states

    def _shown(self, until: Tensor, tokens: Tensor) -> Tensor:
        """Tokens where ``until`` (steps to the commit, int32, overwritten) is negative, else masks.

        Its sign as a bit mask: twice as fast as a choice between two tensors.
        """
        until.bitwise_right_shift_(31).bitwise_and_(tokens ^ self.mask_id)
        return until.bitwise_xor_(self.mask_id)


def _spans(records: Sequence[Trajectory]) -> NDArray[np.int64]:
    """``(5, K)``: row, position, token of every overwritten write; first and last state with it."""
    spans = [np.empty((5, 0), dtype=np.int64)]
    for row, record in enumerate(records):
        if record.superseded is not None:
            step, position, token = record.superseded.T.astype(np.int64)
            ends = flatten([record]).event_ends()
            spans.append(np.stack([np.full_like(step, row), position, token, step + 1, ends]))
    return np.concatenate(spans, axis=1)
