"""A finished decode on the host, and the records that follow from it.

Commit steps and overwritten writes are derived from the canvases of all steps: a change between two
of them is a write, whatever rule of decoding made it. That takes longer than the copying during the
decode, so it is left to whoever asks for the records, such as the writer's thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_dlm.trajectories.features import only_masked
from lit_dlm.trajectories.record import FeatureLayout, FeatureScheme, StepFeatures, Trajectory
from lit_dlm.trajectories.step_buffer import HostCopies

Int32 = NDArray[np.int32]


@dataclass
class KeptStep:
    """Features of one step, for the rows that keep it."""

    step: int
    rows: list[int]
    features: Tensor  # (n, R, F) float32
    proposals: Tensor  # (n, R) int32


@dataclass(frozen=True, kw_only=True)
class FeatureForm:
    """How features are stored; see :class:`StepFeatures`."""

    groups: tuple[int, ...]
    projector_digest: str
    scheme: FeatureScheme
    layout: FeatureLayout


@dataclass(frozen=True, eq=False, kw_only=True)
class CapturedDecode:
    """What the observer leaves behind: buffers that are on the host or on their way there."""

    copies: HostCopies
    """Tells when the tensors below have arrived."""
    canvases: list[Tensor]
    """Parts ``(t, B, G)`` int32 of the response canvas after every step. Rows count only below
    their number of steps."""
    facts: Tensor
    """One int32 row: the response before step 0 ``(B, G)``, prompt columns ``(B, P)``, which of
    them are real ``(B, P)``, numbers of steps ``(B,)``, seeds as pairs ``(B, 2)``, and whether a
    prompt column was editable ``(1,)``."""
    shape: tuple[int, int, int]
    """B, P (columns) and G."""
    status: Sequence[str]
    """How each row ended."""
    mask_id: int
    vocab_size: int
    signals: Mapping[str, list[Tensor]] = field(default_factory=dict)
    """``commit_*`` as one part ``(B, G)``, ``step_*`` in parts ``(t, B, G)``."""
    kept: Sequence[KeptStep] = ()
    form: FeatureForm | None = None
    """Given when features were captured."""

    @property
    def num_rows(self) -> int:
        """B, the number of records."""
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Memory that waits until the records are made, in bytes."""
        tensors = [*self.canvases, self.facts]
        tensors += [part for parts in self.signals.values() for part in parts]
        tensors += [tensor for kept in self.kept for tensor in (kept.features, kept.proposals)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def trajectories(
        self, uids: Sequence[str], metas: Sequence[Mapping[str, Any]] | None = None
    ) -> list[Trajectory]:
        """Derives the records; may be called from any thread.

        Args:
            uids: one name per row of the starting canvas, in its order.
            metas: small JSON values per row.

        Returns:
            One record per row.

        Raises:
            ValueError: If the number of names differs from that of rows, or columns before the
                response were editable.
        """
        B, P, G = self.shape
        if len(uids) != B or (metas is not None and len(metas) != B):
            raise ValueError(
                f"capture: expected {B} uids (and metas), got {len(uids)} and "
                f"{'none' if metas is None else len(metas)}"
            )
        self.copies.wait()
        sizes = np.cumsum([B * G, B * P, B * P, B, 2 * B])
        first, ids, real, num_steps, seeds, editable = np.split(self.facts.numpy(), sizes)
        if editable.any():
            raise ValueError(
                f"capture: editable columns must not lie before column {P}, where the response "
                "begins"
            )
        first, ids, real = first.reshape(B, G), ids.reshape(B, P), real.reshape(B, P) != 0
        tokens, commit_step, events = derive(first, _joined(self.canvases), num_steps)
        given = first != self.mask_id
        unsigned = np.ascontiguousarray(seeds).view(np.uint64).tolist()
        signals = {name: _joined(parts) for name, parts in self.signals.items()}
        records = [
            Trajectory(
                uid=uid,
                prompt_ids=ids[row][real[row]],
                tokens=tokens[row],
                commit_step=commit_step[row],
                num_steps=int(num_steps[row]),
                mask_id=self.mask_id,
                vocab_size=self.vocab_size,
                seed=unsigned[row],
                status=self.status[row],  # type: ignore[arg-type]  # the loop's are ours
                given=given[row],
                superseded=events[row],
                meta=dict(metas[row]) if metas is not None else {},
            )
            for row, uid in enumerate(uids)
        ]
        for row, record in enumerate(records):
            record.signals.update(_signals_of(record, signals, row))
        return records if self.form is None else self._with_features(records, self.form)

    def _with_features(self, records: list[Trajectory], form: FeatureForm) -> list[Trajectory]:
        B, _, G = self.shape
        steps: list[list[int]] = [[] for _ in range(B)]
        features: list[list[Tensor]] = [[] for _ in range(B)]
        proposals: list[list[Tensor]] = [[] for _ in range(B)]
        for kept in self.kept:
            for i, row in enumerate(kept.rows):
                if kept.step < records[row].num_steps:
                    # Left padding goes; the response has the same columns in every row.
                    length = G + (records[row].num_prompt if form.layout == "all" else 0)
                    steps[row].append(kept.step)
                    features[row].append(kept.features[i, -length:])
                    proposals[row].append(kept.proposals[i, -length:])
        with_features = []
        for row, record in enumerate(records):
            if steps[row]:
                stored = StepFeatures.quantize(
                    torch.stack(features[row]).numpy(),
                    kept_steps=np.array(steps[row]),
                    proposals=torch.stack(proposals[row]).numpy(),
                    groups=form.groups,
                    scheme=form.scheme,
                    layout="all" if form.layout == "all" else "generation",
                    projector_digest=form.projector_digest,
                )
                if form.layout == "masked":
                    stored = only_masked(record, stored)
                record = replace(record, features=stored)
            with_features.append(record)
        return with_features


def derive(
    first: Int32, after: Int32, num_steps: NDArray[np.integer[Any]]
) -> tuple[Int32, Int32, list[Int32 | None]]:
    """Final tokens, commit steps and overwritten writes of a batch of histories.

    Args:
        first: ``(B, G)`` int32 response canvas before step 0.
        after: ``(T, B, G)`` int32 canvas after every step; rows count only below their number of
            steps.
        num_steps: ``(B,)`` integer.

    Returns:
        ``(B, G)`` int32 tokens, ``(B, G)`` int32 commit steps (-1: none), and for every row
        ``(K, 3)`` int32 (step, position, token) sorted by (step, position), or ``None``.
    """
    B, G = first.shape
    commit_step = np.full((B, G), -1, dtype=np.int32)
    if len(after) == 0:
        return first.copy(), commit_step, [None] * B
    changed = np.empty(after.shape, dtype=bool)
    np.not_equal(after[0], first, out=changed[0])
    np.not_equal(after[1:], after[:-1], out=changed[1:])
    changed &= (np.arange(len(after))[:, None] < num_steps)[..., None]
    step, cell = np.divmod(np.flatnonzero(changed), B * G)
    commit_step.reshape(-1)[cell] = step  # ascending steps: the last write wins
    tokens = after[np.maximum(num_steps - 1, 0), np.arange(B)]
    tokens[num_steps == 0] = first[num_steps == 0]
    events: list[Int32 | None] = [None] * B
    if len(cell) > np.count_nonzero(commit_step >= 0):  # some position was written twice
        early = step < commit_step.reshape(-1)[cell]
        step, cell = step[early], cell[early]
        row, position = np.divmod(cell, G)
        writes = np.stack([step, position, after.reshape(-1, B * G)[step, cell]], axis=1)
        for number in np.unique(row).tolist():
            events[number] = writes[row == number].astype(np.int32)
    return tokens, commit_step, events


def _joined(parts: Sequence[Tensor]) -> NDArray[Any]:
    """Parts as one array, without copying a single one."""
    array: NDArray[Any] = (parts[0] if len(parts) == 1 else torch.cat(list(parts))).numpy()
    return array


def _signals_of(
    record: Trajectory, signals: Mapping[str, NDArray[Any]], row: int
) -> dict[str, NDArray[Any]]:
    """The signals of one record, the per-step ones in the row order of ``masked_rows``."""
    if not signals:
        return {}
    step, position = record.masked_rows().T
    return {
        name: values[row].copy() if name.startswith("commit_") else values[step, row, position]
        for name, values in signals.items()
    }
