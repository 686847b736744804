"""Records as flat columns, and every rule that columns must obey.

A block of records is processed as a few long arrays: tokens of all records back to back, commit
steps likewise. The rules of the format are written once, here, over these arrays; a single record
is a block of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from numpy.typing import NDArray

from lit_dlm.trajectories.errors import InvariantError

if TYPE_CHECKING:
    from lit_dlm.trajectories.record import Trajectory

MAX_LENGTH = 65_535
"""Largest prompt length, response length and step count of format v1 (16-bit columns)."""
MAX_TOKEN = 2**24 - 1
"""Largest token id of format v1 (24-bit columns)."""
STATUSES: tuple[str, ...] = ("complete", "eos", "step_limit", "aborted")
"""Status names; their index is the stored code."""

_ENDS_AS_MASK = "a position ends as a mask after a write, but has no earlier write"

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False, kw_only=True)
class Columns:
    """``n`` records as flat arrays; SG is the sum of the response lengths."""

    uids: Sequence[str]
    """``n`` names."""
    num_prompt: Int64
    """``(n,)`` P of each record."""
    num_generated: Int64
    """``(n,)`` G of each record."""
    num_steps: Int64
    """``(n,)`` T of each record."""
    prompts: Int32
    """``(sum P,)`` prompt ids."""
    tokens: Int32
    """``(SG,)`` final ids."""
    commit_step: Int32
    """``(SG,)`` step of the last write, -1 where there is none."""
    given: NDArray[np.bool_] | None
    """``(SG,)`` or ``None``."""
    num_events: Int64
    """``(n,)`` superseded writes of each record."""
    events: Int32
    """``(K, 3)`` rows (step, position within the record, token)."""
    mask_id: int
    vocab_size: int

    @property
    def starts(self) -> Int64:
        """``(n,)`` first flat response index of each record."""
        return np.cumsum(self.num_generated) - self.num_generated

    def check(self) -> None:
        """Checks every rule.

        Raises:
            InvariantError: Naming the record and the rule.
        """
        self._check_ids("prompt_ids", self.prompts, self.num_prompt)
        self._check_ids("tokens", self.tokens, self.num_generated)
        commit = self.commit_step
        if len(commit) and not (commit.min() >= -1 and commit.max() < self.num_steps.min()):
            T = np.repeat(self.num_steps, self.num_generated)
            self._refuse((commit < -1) | (commit >= T), "commit_step must be in -1..num_steps - 1")
        written = commit >= 0
        is_mask = self.tokens == self.mask_id
        unwritten = ~written
        if self.given is not None:
            self._refuse(self.given & written, "a given position has a commit step")
            self._refuse(self.given & is_mask, "a given position holds the mask id")
            unwritten &= ~self.given
        self._refuse(
            unwritten & ~is_mask, "a position with no commit step, not given, must hold the mask id"
        )
        removed = written & is_mask
        if len(self.events) == 0:
            self._refuse(
                removed, "a position ends as a mask after a write without an earlier write"
            )
        else:
            self._check_events(removed)

    def _check_events(self, removed: NDArray[np.bool_]) -> None:
        """Events are strictly ordered, in range, before the last write, and change something."""
        record = self.event_records()
        step, position, token = self.events.T.astype(np.int64)
        outside = (step < 0) | (position < 0) | (position >= self.num_generated[record])
        self._refuse_event(outside, record, "lies outside the canvas")
        key = (record * (MAX_LENGTH + 1) + step) * (MAX_LENGTH + 1) + position
        unordered = np.zeros(len(key), dtype=bool)
        unordered[1:] = np.diff(key) <= 0
        self._refuse_event(unordered, record, "is out of (step, position) order")
        flat = self.starts[record] + position
        late = step >= self.commit_step[flat]
        self._refuse_event(late, record, "is not earlier than the last write of its position")
        self._check_ids("superseded", self.events[:, 2], self.num_events)
        order = np.lexsort((step, flat))
        flat, token = flat[order], token[order]
        first = np.ones(len(order), dtype=bool)
        first[1:] = flat[1:] != flat[:-1]
        before = np.where(first, self.mask_id, np.roll(token, 1))
        after = np.where(np.roll(first, -1), self.tokens[flat], np.roll(token, -1))
        repeats = (token == before) | (token == after)
        self._refuse_event(repeats, record[order], "repeats the value that stands there")
        removed = removed.copy()
        removed[flat] = False
        self._refuse(removed, _ENDS_AS_MASK)

    def event_records(self) -> Int64:
        """``(K,)`` record number of each superseded write."""
        return np.repeat(np.arange(len(self.num_events)), self.num_events)

    def event_ends(self) -> Int64:
        """``(K,)`` for each superseded write, the step that overwrote it."""
        record = self.event_records()
        step = self.events[:, 0].astype(np.int64)
        flat = self.starts[record] + self.events[:, 1]
        order = np.lexsort((step, flat))
        ends = self.commit_step[flat].astype(np.int64)
        follows = flat[order][1:] == flat[order][:-1]
        ends[order[:-1][follows]] = step[order[1:][follows]]
        return ends

    def masked_row_counts(self) -> Int64:
        """``(n,)`` pairs (step, position masked before that step) of each record.

        A position written once, at step c, is masked before c + 1 steps; one never written before
        all T. A visible stretch between superseded writes takes its length away, and a final
        re-masking adds the rest.
        """
        T = np.repeat(self.num_steps, self.num_generated)
        is_mask = self.tokens == self.mask_id
        per_position = self.commit_step.astype(np.int64) + 1
        per_position[is_mask] = T[is_mask]
        total = np.concatenate([[0], np.cumsum(per_position)])
        starts = self.starts
        counts = total[starts + self.num_generated] - total[starts]
        if len(self.events):
            visible = self.events[:, 2] != self.mask_id
            spans = (self.event_ends() - self.events[:, 0])[visible]
            np.subtract.at(counts, self.event_records()[visible], spans)
        return counts

    def _check_ids(self, name: str, ids: Int32, lengths: Int64) -> None:
        if len(ids) == 0:
            return
        bound = min(self.vocab_size, MAX_TOKEN + 1)
        if ids.min() >= 0 and ids.max() < bound:
            return
        bad = (ids < 0) | (ids > MAX_TOKEN) | ((ids >= bound) & (ids != self.mask_id))
        if bad.any():
            at = int(np.argmax(bad))
            self._fail(
                int(np.searchsorted(np.cumsum(lengths), at, side="right")),
                f"{name} must be in 0..{bound - 1} (or the mask id {self.mask_id}), got {ids[at]}",
            )

    def _refuse(self, bad: NDArray[np.bool_], rule: str) -> None:
        if bad.any():
            at = int(np.argmax(bad))
            record = int(np.searchsorted(np.cumsum(self.num_generated), at, side="right"))
            self._fail(record, f"{rule} (position {at - int(self.starts[record])})")

    def _refuse_event(self, bad: NDArray[np.bool_], record: Int64, rule: str) -> None:
        if bad.any():
            self._fail(int(record[np.argmax(bad)]), f"a superseded write {rule}")

    def _fail(self, record: int, rule: str) -> NoReturn:
        uid = self.uids[record]
        raise InvariantError(f"trajectory {uid!r}: {rule}", record=uid)


def flatten(records: Sequence[Trajectory]) -> Columns:
    """Lays records end to end. Shapes that do not fit together raise ``InvariantError``."""
    mask_id, vocab_size = records[0].mask_id, records[0].vocab_size
    events = [r.superseded for r in records if r.superseded is not None]
    given = None
    for r in records:
        if (r.mask_id, r.vocab_size) != (mask_id, vocab_size):
            raise InvariantError(
                f"trajectory {r.uid!r}: mask id and vocabulary size must be those of the block, "
                f"expected {(mask_id, vocab_size)}, got {(r.mask_id, r.vocab_size)}"
            )
        G = len(r.tokens)
        if r.commit_step.shape != (G,) or (r.given is not None and r.given.shape != (G,)):
            raise InvariantError(
                f"trajectory {r.uid!r}: commit_step and given must have shape ({G},) like tokens"
            )
        if max(len(r.prompt_ids), G, r.num_steps) > MAX_LENGTH or r.num_steps < 0:
            raise InvariantError(
                f"trajectory {r.uid!r}: prompt length, response length and steps must be in "
                f"0..{MAX_LENGTH}, got {(len(r.prompt_ids), G, r.num_steps)}"
            )
    if any(r.given is not None for r in records):
        given = np.concatenate(
            [np.zeros(len(r.tokens), dtype=bool) if r.given is None else r.given for r in records]
        )
    return Columns(
        uids=[r.uid for r in records],
        num_prompt=np.array([len(r.prompt_ids) for r in records], dtype=np.int64),
        num_generated=np.array([len(r.tokens) for r in records], dtype=np.int64),
        num_steps=np.array([r.num_steps for r in records], dtype=np.int64),
        prompts=np.concatenate([r.prompt_ids for r in records]),
        tokens=np.concatenate([r.tokens for r in records]),
        commit_step=np.concatenate([r.commit_step for r in records]),
        given=given,
        num_events=np.array(
            [0 if r.superseded is None else len(r.superseded) for r in records], dtype=np.int64
        ),
        events=np.concatenate(events) if events else np.empty((0, 3), dtype=np.int32),
        mask_id=mask_id,
        vocab_size=vocab_size,
    )
