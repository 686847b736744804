"""The record of one decode: final tokens, commit steps, and the writes that were overwritten.

Without re-masking, two integer rows describe every canvas of a decode: the state before step ``t``
shows the tokens whose commit step is below ``t``. With re-masking or token edits the
writes that were later overwritten are kept beside them. Nothing else is stored: masks, orders,
labels and intermediate canvases are derived here.

Replay (:meth:`Trajectory.state_at`, :meth:`Trajectory.all_states`) is a function of the record
alone. It proves nothing about the model; re-execution is a different operation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lit_dlm.trajectories.columns import MAX_LENGTH, STATUSES, flatten
from lit_dlm.trajectories.features import StepFeatures

Status = Literal["complete", "eos", "step_limit", "aborted"]
"""How a decode ended: canvas full, stopped at an end token, out of steps, or interrupted."""

Int32 = NDArray[np.int32]

SIGNAL_DTYPES: dict[str, np.dtype] = {
    "commit_prob": np.dtype(np.float16),
    "commit_margin": np.dtype(np.float16),
    "commit_score": np.dtype(np.float16),
    "commit_log_prob": np.dtype(np.float32),
    "commit_value": np.dtype(np.float16),
    "commit_advantage": np.dtype(np.float16),
    "step_time_us": np.dtype(np.uint32),
    "step_prob": np.dtype(np.float16),
    "step_entropy": np.dtype(np.float16),
    "step_proposal": np.dtype(np.int32),
}
"""Optional columns. ``commit_*`` have one value per response position, ``step_time_us`` one per
step, ``step_*`` one per (step, position that is masked before that step), ordered by step, then
position (see :meth:`Trajectory.masked_rows`)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Trajectory:
    """One decoded sample. Arrays are numpy on the host; treat them as read-only."""

    uid: str
    """Stable name of the sample, unique in a data set."""
    prompt_ids: Int32
    """``(P,)`` int32, without padding."""
    tokens: Int32
    """``(G,)`` int32 after the last step; the mask id where nothing stands."""
    commit_step: Int32
    """``(G,)`` int32, the step of the last write; -1 where no step wrote (empty or given)."""
    num_steps: int
    """Executed steps T."""
    mask_id: int
    """Id of the mask token."""
    vocab_size: int
    """Token ids are below this number (the mask id may be above)."""
    seed: int = 0
    """Noise seed of this sample, 0 <= seed < 2**64."""
    status: Status = "complete"
    """How the decode ended."""
    given: NDArray[np.bool_] | None = None
    """``(G,)`` bool, ``True`` where a token stood before step 0; ``None`` when there is none."""
    superseded: Int32 | None = None
    """``(K, 3)`` int32 rows (step, position, token) of the writes that were later overwritten,
    sorted by (step, position); ``None`` when there is none."""
    signals: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Optional columns by name, see :data:`SIGNAL_DTYPES`."""
    features: StepFeatures | None = None
    """Features of kept steps, where they were captured."""
    meta: dict[str, Any] = field(default_factory=dict)
    """Anything small that JSON can hold: source, reward, finish reason."""

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name in ("prompt_ids", "tokens", "commit_step"):
            array = np.ascontiguousarray(getattr(self, name), dtype=np.int32)
            if array.ndim != 1:
                raise ValueError(
                    f"trajectory {self.uid!r}: {name} must have one dimension, "
                    f"got shape {array.shape}"
                )
            put(self, name, array)
        for name in ("num_steps", "mask_id", "vocab_size", "seed"):
            put(self, name, int(getattr(self, name)))
        if self.given is not None:
            given = np.asarray(self.given, dtype=np.bool_)
            put(self, "given", given if given.any() else None)
        if self.superseded is not None:
            events = np.asarray(self.superseded, dtype=np.int32).reshape(-1, 3)
            put(self, "superseded", np.ascontiguousarray(events) if len(events) else None)

    @property
    def num_prompt(self) -> int:
        """P, the number of prompt tokens."""
        return len(self.prompt_ids)

    @property
    def num_generated(self) -> int:
        """G, the number of response positions."""
        return len(self.tokens)

    @property
    def num_committed(self) -> int:
        """Response positions that a step wrote and that hold a token at the end."""
        return int(((self.commit_step >= 0) & (self.tokens != self.mask_id)).sum())

    def initial(self) -> Int32:
        """``(G,)`` int32: the canvas before step 0, masks except for given tokens."""
        state = np.full_like(self.tokens, self.mask_id)
        if self.given is not None:
            state[self.given] = self.tokens[self.given]
        return state

    def state_at(self, step: int) -> Int32:
        """The response canvas before step ``step``, that is, the input of forward ``step``.

        Args:
            step: 0 (nothing committed) to ``num_steps`` (final).

        Returns:
            ``(G,)`` int32.
        """
        self._check_step(step, self.num_steps)
        state = self.tokens.copy()
        np.putmask(state, self.commit_step >= step, self.mask_id)
        if self.superseded is not None:
            events = self.superseded[: np.searchsorted(self.superseded[:, 0], step)]
            # Sorted by step: for a repeated index numpy keeps the last, which is the latest write.
            open_rows = self.commit_step[events[:, 1]] >= step
            state[events[open_rows, 1]] = events[open_rows, 2]
        return state

    def all_states(self) -> Int32:
        """``(T + 1, G)`` int32: row ``t`` equals ``state_at(t)``."""
        steps = np.arange(self.num_steps + 1, dtype=np.int32)[:, None]
        # The sign of (commit step - step) as a bit mask, in place: three times faster than a choice
        # between two arrays.
        states = self.commit_step - steps
        states >>= 31
        states &= self.tokens ^ np.int32(self.mask_id)
        states ^= np.int32(self.mask_id)
        if self.superseded is not None:
            ends = flatten([self]).event_ends().tolist()
            for (step, position, token), end in zip(self.superseded.tolist(), ends, strict=True):
                states[step + 1 : end + 1, position] = token
        return states

    def canvas(self, step: int | None = None) -> Int32:
        """``(P + G,)`` int32: the prompt and the response before ``step`` (default: final)."""
        response = self.tokens if step is None else self.state_at(step)
        return np.concatenate([self.prompt_ids, response])

    def committed_at(self, step: int) -> NDArray[np.int64]:
        """Positions ``(K,)`` int64, ascending, that step ``step`` wrote."""
        self._check_step(step, self.num_steps - 1)
        last = np.flatnonzero(self.commit_step == step)
        if self.superseded is None:
            return last
        early = self.superseded[self.superseded[:, 0] == step, 1]
        return np.union1d(last, early).astype(np.int64)

    def events(self) -> Int32:
        """All writes, ``(K, 3)`` int32 rows (step, position, token), sorted by (step, position)."""
        positions = np.flatnonzero(self.commit_step >= 0).astype(np.int32)
        final = np.stack(
            [self.commit_step[positions], positions, self.tokens[positions]], axis=1
        ).astype(np.int32)
        if self.superseded is not None:
            final = np.concatenate([self.superseded, final])
        return final[np.lexsort((final[:, 1], final[:, 0]))]

    def masked_rows(self) -> NDArray[np.int64]:
        """The row order of the ``step_*`` signals.

        Returns:
            ``(R, 2)`` int64 rows (step, position) of every position that is masked before its
            step, sorted by step, then position.
        """
        return np.argwhere(self.all_states()[:-1] == self.mask_id)

    def num_masked_rows(self) -> int:
        """The number of rows of :meth:`masked_rows`, without building them."""
        return int(flatten([self]).masked_row_counts()[0])

    def digest(self) -> bytes:
        """Content digest (16 bytes): equal for equal prompts, writes and lengths.

        SHA-256 over a tag, the lengths, prompt ids, final ids, commit steps and superseded writes,
        all as little-endian unsigned 32-bit numbers (so -1 is ``0xFFFFFFFF``), cut to 16 bytes.
        It depends neither on the uid nor on how the record is stored.
        """
        num_events = 0 if self.superseded is None else len(self.superseded)
        head = (self.num_prompt, self.num_generated, self.num_steps, self.mask_id, num_events)
        sha = hashlib.sha256(DIGEST_TAG)
        sha.update(np.array(head, dtype="<u4").tobytes())
        for part in (self.prompt_ids, self.tokens, self.commit_step):
            sha.update(part.astype("<i4", copy=False).tobytes())
        if self.superseded is not None:
            sha.update(self.superseded.astype("<i4", copy=False).tobytes())
        return sha.digest()[:16]

    def validate(self) -> None:
        """Checks every rule of the format.

        Raises:
            ValueError: Naming the sample, the field and what was wrong.
        """
        if not 0 <= self.seed < 2**64:
            self._fail(f"seed must be in 0..2**64-1, got {self.seed}")
        if self.status not in STATUSES:
            self._fail(f"status must be one of {STATUSES}, got {self.status!r}")
        if not self.uid or len(self.uid.encode()) > MAX_LENGTH:
            self._fail("uid must have 1 to 65535 bytes of UTF-8")
        flatten([self]).check()
        self._check_signals()
        if self.features is not None:
            self.features.validate(self.uid, self.num_prompt, self.num_generated, self.num_steps)

    def with_meta(self, **values: Any) -> Trajectory:
        """A copy whose ``meta`` has ``values`` added."""
        return replace(self, meta={**self.meta, **values})

    # -- internals -----------------------------------------------------------------------------

    def _fail(self, message: str) -> None:
        raise ValueError(f"trajectory {self.uid!r}: {message}")

    def _check_step(self, step: int, last: int) -> None:
        if not 0 <= step <= last:
            self._fail(f"step must be in 0..{last}, got {step}")

    def _check_signals(self) -> None:
        rows: int | None = None
        for name, array in self.signals.items():
            if name not in SIGNAL_DTYPES:
                self._fail(f"unknown signal {name!r}; known: {sorted(SIGNAL_DTYPES)}")
            if name.startswith("commit_"):
                expected = self.num_generated
            elif name == "step_time_us":
                expected = self.num_steps
            else:
                rows = self.num_masked_rows() if rows is None else rows
                expected = rows
            if array.shape != (expected,):
                self._fail(f"signal {name!r} must have shape ({expected},), got {array.shape}")


DIGEST_TAG = b"ldt.traj.v1\0"


def from_history(
    history: ArrayLike,
    *,
    uid: str,
    prompt_ids: ArrayLike,
    mask_id: int,
    vocab_size: int,
    seed: int = 0,
    status: Status = "complete",
    signals: Mapping[str, NDArray[Any]] | None = None,
    features: StepFeatures | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Trajectory:
    """Builds a record from the canvases of every step.

    Any decode rule fits: a change between two rows is a write of the earlier row's step, whether it
    commits, edits or masks again. Tokens that stand in row 0 count as given.

    Args:
        history: ``(T + 1, G)`` integer; row ``t`` is the response canvas before step ``t``, the
            last row the final one.
        uid: name of the sample.
        prompt_ids: ``(P,)`` integer, without padding.
        mask_id: id of the mask token.
        vocab_size: bound of the token ids.
        seed: noise seed of the sample.
        status: how the decode ended.
        signals: optional columns.
        features: features of kept steps.
        meta: small JSON values.

    Returns:
        The record, validated.

    Raises:
        ValueError: If ``history`` has another shape or a given position changes.
    """
    rows = np.ascontiguousarray(history, dtype=np.int32)
    if rows.ndim != 2 or len(rows) == 0:
        raise ValueError(
            f"trajectory {uid!r}: history must have shape (T + 1, G), got {rows.shape}"
        )
    num_steps = len(rows) - 1
    given = rows[0] != mask_id
    # Written once per position and never changed is the common case: 2-D work only on what differs.
    step, position = np.nonzero(rows[1:] != rows[:-1])
    commit_step = np.full(rows.shape[1], -1, dtype=np.int32)
    commit_step[position] = step  # ascending steps: the last write wins
    if (commit_step[given] >= 0).any():
        at = int(np.flatnonzero(given & (commit_step >= 0))[0])
        raise ValueError(f"trajectory {uid!r}: given position {at} changed during decoding")
    early = step < commit_step[position]
    superseded = None
    if early.any():
        step, position = step[early], position[early]
        superseded = np.stack([step, position, rows[step + 1, position]], axis=1)
    record = Trajectory(
        uid=uid,
        prompt_ids=np.asarray(prompt_ids, dtype=np.int32),
        tokens=rows[-1].copy(),
        commit_step=commit_step,
        num_steps=num_steps,
        mask_id=mask_id,
        vocab_size=vocab_size,
        seed=seed,
        status=status,
        given=given,
        superseded=superseded,
        signals=dict(signals or {}),
        features=features,
        meta=dict(meta or {}),
    )
    record.validate()
    return record


def trusted(values: dict[str, Any]) -> Trajectory:
    """A record that takes over fields already checked and of the right dtypes.

    The block reader builds tens of thousands of records a second from checked columns; the checks
    of the constructor would be most of that time.
    """
    record = object.__new__(Trajectory)
    object.__setattr__(record, "__dict__", values)
    return record
