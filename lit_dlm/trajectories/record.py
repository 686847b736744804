"""The record of one decode: final tokens, commit steps, and the writes that were overwritten.

Without re-masking, two integer rows describe every canvas of a decode: the state before step ``t``
shows the tokens whose commit step is below ``t``. With re-masking or token edits the writes that
were later overwritten are kept as well. All else is derived here, without the model, so a replay
proves nothing about it.

Many records are processed as a few long arrays (:class:`Columns`). The rules of the format are
implemented once, on these arrays; a single record is checked as a set of one.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from lit_dlm.trajectories.features import StepFeatures


class TrajectoryFormatError(ValueError):
    """A record, block, shard or side file breaks a rule of the format; the message says which."""


def expect(holds: object, message: str) -> None:
    """Refuses what breaks a rule of the format."""
    if not holds:
        raise TrajectoryFormatError(message)


RecordStatus = Literal["complete", "eos", "step_limit", "aborted"]
"""How a decode ended: canvas full, stopped at an end token, out of steps, or interrupted."""
STATUSES: tuple[str, ...] = ("complete", "eos", "step_limit", "aborted")
MAX_LENGTH = 65_535
"""Largest prompt length, response length and step count of the format (16-bit columns)."""
_META_TYPES: dict[str, Any] = {"task": str, "method": str, "correct": (bool, type(None))}
DIGEST_TAG = b"ldt.traj.v1\0"

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

SIGNAL_DTYPES: dict[str, np.dtype] = {
    "commit_prob": np.dtype(np.float16),
    "commit_margin": np.dtype(np.float16),
    "commit_score": np.dtype(np.float16),
    "commit_log_prob": np.dtype(np.float32),
    "commit_value": np.dtype(np.float16),
    "commit_advantage": np.dtype(np.float16),
    "step_prob": np.dtype(np.float16),
    "step_entropy": np.dtype(np.float16),
    "step_proposal": np.dtype(np.int32),
    "step_commit": np.dtype(np.int8),
    "step_log_odds": np.dtype(np.float32),
}
"""Optional columns. ``commit_*`` have one value per response position, ``step_*`` one per (step,
position that is masked before that step), ordered by step, then position (see
:meth:`Trajectory.masked_rows`)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Trajectory:
    """One decoded sample. Arrays are numpy on the host; treat them as read-only."""

    uid: str  # stable name of the sample, unique in a data set
    prompt_ids: Int32  # (P,) int32, without padding
    tokens: Int32  # (G,) int32 after the last step; the mask id in unfilled positions
    commit_step: Int32
    """``(G,)`` int32, the step of the last write; -1 where no step wrote (empty or given)."""
    num_steps: int  # executed steps T
    mask_id: int  # id of the mask token
    vocab_size: int  # token ids are below this number (the mask id may be above)
    seed: int = 0  # noise seed of this sample, 0 <= seed < 2**64
    status: RecordStatus = "complete"
    given: NDArray[np.bool_] | None = None
    """``(G,)`` bool, ``True`` where a token was set before step 0; ``None`` if none was."""
    superseded: Int32 | None = None
    """``(K, 3)`` int32 rows (step, position, token) of the writes that were later overwritten,
    sorted by (step, position); ``None`` if there are none."""
    signals: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Optional columns by name, see :data:`SIGNAL_DTYPES`."""
    features: StepFeatures | None = None  # features of kept steps, where they were captured
    meta: dict[str, Any] = field(default_factory=dict)
    """Anything small that JSON can hold: source, reward, finish reason."""

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name in ("prompt_ids", "tokens", "commit_step"):
            put(self, name, np.ascontiguousarray(getattr(self, name), dtype=np.int32))
        for name in ("num_steps", "mask_id", "vocab_size", "seed"):
            put(self, name, int(getattr(self, name)))
        if self.given is not None:
            # None stands for none, so that a record read back equals the one that was written.
            given = np.asarray(self.given, dtype=np.bool_)
            put(self, "given", given if given.any() else None)
        if self.superseded is not None:
            events = np.asarray(self.superseded, dtype=np.int32).reshape(-1, 3)
            put(self, "superseded", np.ascontiguousarray(events) if len(events) else None)

    @property
    def num_prompt(self) -> int:  # P
        return len(self.prompt_ids)

    @property
    def num_generated(self) -> int:  # G
        return len(self.tokens)

    @property
    def num_committed(self) -> int:
        """Number of response positions that a step wrote and that hold a token at the end."""
        return int(((self.commit_step >= 0) & (self.tokens != self.mask_id)).sum())

    def initial(self) -> Int32:
        """``(G,)`` int32: the canvas before step 0, masks except for given tokens."""
        state = np.full_like(self.tokens, self.mask_id)
        if self.given is not None:
            state[self.given] = self.tokens[self.given]
        return state

    def state_at(self, step: int) -> Int32:
        """``(G,)`` int32: the response canvas before step ``step``, 0 to ``num_steps`` (final)."""
        self._check_step(step, self.num_steps)
        state = self.tokens.copy()
        # Given tokens and those never written have step -1, so they stay; the latter are masks.
        np.putmask(state, self.commit_step >= step, self.mask_id)
        if self.superseded is not None:
            events = self.superseded[: np.searchsorted(self.superseded[:, 0], step)]
            # Sorted by step: for a repeated index numpy keeps the last, which is the latest write.
            is_open = self.commit_step[events[:, 1]] >= step
            state[events[is_open, 1]] = events[is_open, 2]
        return state

    def all_states(self) -> Int32:
        """``(T + 1, G)`` int32: row ``t`` equals ``state_at(t)``."""
        steps = np.arange(self.num_steps + 1, dtype=np.int32)[:, None]
        # The sign of (commit step - step) becomes a bit mask, in place: three times faster than
        # selecting from two arrays.
        states = self.commit_step - steps
        states >>= 31
        states &= self.tokens ^ np.int32(self.mask_id)
        states ^= np.int32(self.mask_id)
        if self.superseded is not None:
            ends = flatten([self]).event_ends().tolist()
            for (step, position, token), end in zip(self.superseded.tolist(), ends, strict=True):
                states[step + 1 : end + 1, position] = token
        return states

    def committed_at(self, step: int) -> NDArray[np.int64]:
        """``(K,)`` int64: the positions that step ``step`` wrote, ascending."""
        self._check_step(step, self.num_steps - 1)
        steps, positions, _ = self.events().T
        return positions[steps == step].astype(np.int64)

    def events(self) -> Int32:
        """All writes, ``(K, 3)`` int32 rows (step, position, token), sorted by (step, position)."""
        # The last write of a position is no event: its commit step and token already say it.
        positions = np.flatnonzero(self.commit_step >= 0).astype(np.int32)
        final = np.stack(
            [self.commit_step[positions], positions, self.tokens[positions]], axis=1
        ).astype(np.int32)
        if self.superseded is not None:
            final = np.concatenate([self.superseded, final])
        return final[np.lexsort((final[:, 1], final[:, 0]))]

    def masked_rows(self) -> NDArray[np.int64]:
        """``(R, 2)`` int64: all pairs (step, position masked before it), ordered as ``step_*``."""
        return np.argwhere(self.all_states()[:-1] == self.mask_id)

    def commit_entropy(self, *, fill: float) -> NDArray[np.float32] | None:
        """``(G,)`` entropy (nats) at the step that wrote a position, else ``fill``; if recorded."""
        if "step_entropy" not in self.signals:
            return None
        step, position = self.masked_rows().T
        written = self.commit_step[position] == step
        entropy = np.full(self.num_generated, fill, dtype=np.float32)
        entropy[position[written]] = self.signals["step_entropy"][written]
        return entropy

    def digest(self) -> bytes:
        """Content digest (16 bytes): equal for equal prompts, writes and lengths.

        SHA-256 over a tag, the lengths, prompt ids, final ids, commit steps and superseded writes,
        all as little-endian unsigned 32-bit numbers (so -1 is ``0xFFFFFFFF``), cut to 16 bytes.
        """
        return flatten([self]).content_digests()[0]

    def validate(self) -> None:
        """Checks every rule of the format; an error names the sample and the field."""
        checked([self])

    def with_meta(self, **values: Any) -> Trajectory:
        """A copy whose ``meta`` has ``values`` added."""
        return replace(self, meta={**self.meta, **values})

    def show(self, tokenizer: Any | None = None) -> Any:
        """Returns the decode for the output of a notebook; token ids without a tokenizer."""
        # By its name, as no record may depend on what shows it.
        return import_module("lit_dlm.reports.notebook").show_records([self], tokenizer)

    # -- internals -----------------------------------------------------------------------------

    def _check_step(self, step: int, last: int) -> None:
        if not 0 <= step <= last:  # no call of expect: a replay would format its text every time
            raise ValueError(f"trajectory {self.uid!r}: step must be in 0..{last}, got {step}")

    def _check_fields(self, masked_rows: int) -> None:
        """Checks what :class:`Columns` does not: seed, status, uid and signals."""
        wrong = ""
        if not 0 <= self.seed < 2**64:
            wrong = f"seed must be in 0..2**64-1, got {self.seed}"
        if self.status not in STATUSES:
            wrong = f"status must be one of {STATUSES}, got {self.status!r}"
        has_half = any("\ud800" <= letter <= "\udfff" for letter in self.uid)  # of a surrogate pair
        if has_half or not 1 <= len(self.uid.encode()) <= MAX_LENGTH:
            wrong = f"uid must be a text of 1 to {MAX_LENGTH} bytes of UTF-8"
        for name in _META_TYPES.keys() & self.meta.keys():
            if not isinstance(self.meta[name], _META_TYPES[name]):
                wrong = f"meta {name!r}: got {type(self.meta[name]).__name__}"
        for name, array in self.signals.items():
            expected = self.num_generated if name.startswith("commit_") else masked_rows
            if name not in SIGNAL_DTYPES or array.shape != (expected,):
                wrong = (
                    f"signal {name!r}: expected one of {sorted(SIGNAL_DTYPES)} with shape "
                    f"{(expected,)}, got {array.shape}"
                )
        expect(not wrong, f"trajectory {self.uid!r}: {wrong}")


def derive(first: Int32, after: Int32, mask_id: int) -> dict[str, Any]:
    """Returns the fields of a record that follow from the canvases of its decode.

    ``first`` ``(G,)`` int32 is the response before step 0, ``after`` ``(T, G)`` after every step.
    """
    states = np.concatenate([first[None], after])
    # A write of the token that stands there already cannot be seen, and changes nothing.
    step, position = np.nonzero(states[1:] != states[:-1])
    commit_step = np.full(len(first), -1, dtype=np.int32)
    commit_step[position] = step  # ascending steps: the last write wins
    early = step < commit_step[position]
    step, position = step[early], position[early]
    return {
        "tokens": states[-1].copy(),
        "commit_step": commit_step,
        "num_steps": len(after),
        "mask_id": mask_id,
        "given": first != mask_id,
        "superseded": np.stack([step, position, after[step, position]], axis=1),
    }


def flatten(records: Sequence[Trajectory]) -> Columns:
    """Concatenates records into flat arrays; raises ``TrajectoryFormatError`` if shapes differ."""
    _check_shapes(records)
    nothing = np.empty((0, 3), dtype=np.int32)
    events = [nothing if r.superseded is None else r.superseded for r in records]
    given = None  # in most sets no record has any: then nothing is concatenated, nor checked
    if any(r.given is not None for r in records):
        given = np.concatenate(
            [np.zeros(len(r.tokens), dtype=bool) if r.given is None else r.given for r in records]
        )
    lengths = [
        (r.num_prompt, r.num_generated, r.num_steps, len(own))
        for r, own in zip(records, events, strict=True)
    ]
    num_prompt, num_generated, num_steps, num_events = np.array(lengths, dtype=np.int64).T.copy()
    return Columns(
        uids=[r.uid for r in records],
        num_prompt=num_prompt,
        num_generated=num_generated,
        num_steps=num_steps,
        prompts=np.concatenate([r.prompt_ids for r in records]),
        tokens=np.concatenate([r.tokens for r in records]),
        commit_step=np.concatenate([r.commit_step for r in records]),
        given=given,
        num_events=num_events,
        events=np.concatenate(events),
        mask_id=records[0].mask_id,
        vocab_size=records[0].vocab_size,
    )


def _check_shapes(records: Sequence[Trajectory]) -> None:
    first = records[0]
    for r in records:
        shape = r.tokens.shape
        lengths = (*r.prompt_ids.shape, *shape, r.num_steps)
        expect(
            (r.mask_id, r.vocab_size) == (first.mask_id, first.vocab_size)
            and r.commit_step.shape == shape
            and (r.given is None or r.given.shape == shape)
            and len(lengths) == 3
            and 0 <= min(lengths) <= max(lengths) <= MAX_LENGTH,
            f"trajectory {r.uid!r}: expected the mask id and vocabulary of its block, lengths "
            f"and steps up to {MAX_LENGTH}, and commit_step and given of the shape of tokens",
        )


def checked(records: Sequence[Trajectory]) -> Columns:
    """Concatenates records and checks every rule of the format.

    Together they take a tenth of the time that they take one by one.
    """
    flat = flatten(records)
    flat.check()
    for r, rows in zip(records, flat.masked_row_counts().tolist(), strict=True):
        r._check_fields(rows)
        if r.features is not None:
            r.features.validate(r.uid, r.num_prompt, r.num_generated, r.num_steps)
    return flat


def trusted(values: dict[str, Any]) -> Trajectory:
    """Builds a record from checked fields of the right dtypes."""
    # A reader has thousands, and the constructor would take most of its time.
    record = object.__new__(Trajectory)
    object.__setattr__(record, "__dict__", values)
    return record


@dataclass(frozen=True, eq=False, kw_only=True)
class Columns:
    """``n`` records as flat arrays; SG is the sum of the response lengths."""

    uids: Sequence[str]
    num_prompt: Int64  # (n,) P of each record
    num_generated: Int64  # (n,) G of each record
    num_steps: Int64  # (n,) T of each record
    prompts: Int32  # (sum P,) prompt ids
    tokens: Int32  # (SG,) final ids
    commit_step: Int32  # (SG,) step of the last write, -1 where there is none
    given: NDArray[np.bool_] | None  # (SG,) or None
    num_events: Int64  # (n,) superseded writes of each record
    events: Int32  # (K, 3) rows (step, position within the record, token)
    mask_id: int
    vocab_size: int

    @property
    def starts(self) -> Int64:
        """``(n,)`` first flat response index of each record."""
        return np.cumsum(self.num_generated) - self.num_generated

    def check(self) -> None:
        """Checks every rule; an error names the record and the rule."""
        for name in ("mask_id", "vocab_size"):
            if not 0 <= (value := getattr(self, name)) < 2**31:
                self._fail(0, f"{name} must be in 0..2**31-1, got {value}")
        self._check_ids("prompt_ids", self._words(), self.num_prompt)
        self._check_ids("tokens", self.tokens, self.num_generated)
        commit = self.commit_step
        # Against the fewest steps of all at first: a bound for each position takes an array more.
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
        # A last write of the mask id takes a token back, so there must be an event that set it.
        removed = written & is_mask
        if len(self.events):
            removed[self._check_events()] = False
        self._refuse(removed, "a position ends as a mask after a write without an earlier write")

    def _check_events(self) -> Int64:
        """Checks events: strictly ordered, in range, before the last write, each a real change.

        Returns:
            ``(K,)`` flat response indices of the events, ascending.
        """
        record = self.event_records()
        step, position, token = self.events.T.astype(np.int64)
        outside = (step < 0) | (position < 0) | (position >= self.num_generated[record])
        self._refuse_event(outside, record, "lies outside the canvas")
        # One number for (record, step, position), each below 2 ** 16: strictly ascending means
        # sorted, and no position twice in a step.
        key = (record * (MAX_LENGTH + 1) + step) * (MAX_LENGTH + 1) + position
        unordered = np.zeros(len(key), dtype=bool)
        unordered[1:] = np.diff(key) <= 0
        self._refuse_event(unordered, record, "is out of (step, position) order")
        flat = self.starts[record] + position
        late = step >= self.commit_step[flat]
        self._refuse_event(late, record, "is not earlier than the last write of its position")
        self._check_ids("superseded", self.events[:, 2], self.num_events)
        # By position, then step: what stood there is the token of the event before, or a mask, and
        # what follows is that of the next event, or the final token.
        order = np.lexsort((step, flat))
        flat, token = flat[order], token[order]
        first = np.ones(len(order), dtype=bool)
        first[1:] = flat[1:] != flat[:-1]
        before = np.where(first, self.mask_id, np.roll(token, 1))
        after = np.where(np.roll(first, -1), self.tokens[flat], np.roll(token, -1))
        repeats = (token == before) | (token == after)
        self._refuse_event(repeats, record[order], "repeats the value that stands there")
        return flat

    def event_records(self) -> Int64:
        """``(K,)`` record number of each superseded write."""
        return np.repeat(np.arange(len(self.num_events)), self.num_events)

    def event_ends(self) -> Int64:
        """``(K,)`` for each superseded write, the step that overwrote it."""
        record = self.event_records()
        step = self.events[:, 0].astype(np.int64)
        flat = self.starts[record] + self.events[:, 1]
        order = np.lexsort((step, flat))
        # The last event of a position ends with the last write, each other with the next event.
        ends = self.commit_step[flat].astype(np.int64)
        follows = flat[order][1:] == flat[order][:-1]
        ends[order[:-1][follows]] = step[order[1:][follows]]
        return ends

    def masked_row_counts(self) -> Int64:
        """``(n,)`` number of pairs (step, position masked before that step) in each record.

        A position written once, at step c, is masked before c + 1 steps, and one that ends as a
        mask counts as masked before all T; the stretches in which superseded tokens were visible
        are then subtracted.
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

    def content_digests(self) -> list[bytes]:
        """``n`` content digests of 16 bytes, see :meth:`Trajectory.digest`."""
        prompts, tokens, commits, events = (
            memoryview(part.astype("<i4", copy=False).tobytes())
            for part in (self.prompts, self.tokens, self.commit_step, self.events)
        )
        pack, sha256 = struct.Struct(f"<{len(DIGEST_TAG)}s5I").pack, hashlib.sha256
        # Slices of the bytes of all records: a hash needs no arrays of its own.
        digests, p, g, e = [], 0, 0, 0
        mask_id = self.mask_id
        lengths = (self.num_prompt, self.num_generated, self.num_steps, self.num_events)
        for P, G, T, K in zip(*(length.tolist() for length in lengths), strict=True):
            p_end, g_end, e_end = p + 4 * P, g + 4 * G, e + 12 * K
            body = b"".join(
                (
                    pack(DIGEST_TAG, P, G, T, mask_id, K),
                    prompts[p:p_end],
                    tokens[g:g_end],
                    commits[g:g_end],
                    events[e:e_end],
                )
            )
            digests.append(sha256(body).digest()[:16])
            p, g, e = p_end, g_end, e_end
        return digests

    def _words(self) -> Int32:
        """The prompts with 0 for picture rows, which are numbered upwards from ``vocab_size``."""
        is_row = self.prompts >= self.vocab_size
        if not is_row.any():
            return self.prompts
        # Numbers start anew in each record: the count of all, less that before the record.
        count = np.cumsum(is_row)
        before = np.concatenate([[0], count])[np.cumsum(self.num_prompt) - self.num_prompt]
        number = count - np.repeat(before, self.num_prompt)
        return np.where(is_row & (self.prompts - self.vocab_size + 1 == number), 0, self.prompts)

    def _check_ids(self, name: str, ids: Int32, lengths: Int64) -> None:
        bound = self.vocab_size
        # Most ids are words: two passes decide, without an array of booleans.
        if len(ids) == 0 or (ids.min() >= 0 and ids.max() < bound):
            return
        bad = (ids < 0) | ((ids >= bound) & (ids != self.mask_id))
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
        raise TrajectoryFormatError(f"trajectory {uid!r}: {rule}")
