"""Optional signal columns: probabilities, margins, entropies, proposals, times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lit_dlm.trajectories.column_io import ColumnReader, make_column
from lit_dlm.trajectories.columns import Columns, Int64
from lit_dlm.trajectories.container import Column, Dtype
from lit_dlm.trajectories.errors import InvariantError
from lit_dlm.trajectories.record import SIGNAL_DTYPES

if TYPE_CHECKING:
    from lit_dlm.trajectories.record import Trajectory

SIGNAL_TAGS: dict[str, tuple[str, Dtype]] = {
    "commit_prob": ("CCNF", Dtype.F16),
    "commit_margin": ("CMRG", Dtype.F16),
    "commit_score": ("CSCO", Dtype.F16),
    "commit_log_prob": ("ROLD", Dtype.F32),
    "commit_value": ("CVAL", Dtype.F16),
    "commit_advantage": ("CADV", Dtype.F16),
    "step_time_us": ("STMU", Dtype.U32),
    "step_prob": ("RCNF", Dtype.F16),
    "step_entropy": ("RENT", Dtype.F16),
    "step_proposal": ("RPRP", Dtype.U24),
}
"""Signal name to column."""


def _signal_lengths(name: str, flat: Columns, masked_rows: Int64 | None) -> Int64:
    if name.startswith("commit_"):
        return flat.num_generated
    if name == "step_time_us":
        return flat.num_steps
    assert masked_rows is not None
    return masked_rows


_PER_ROW = ("step_prob", "step_entropy", "step_proposal")


def signal_columns(records: Sequence[Trajectory], flat: Columns) -> list[Column]:
    """The signal columns of a block; all records must carry the same signals."""
    names = sorted(records[0].signals)
    for record in records:
        if sorted(record.signals) != names:
            raise InvariantError(
                f"trajectory {record.uid!r}: all records of a block need the same signals, "
                f"expected {names}, got {sorted(record.signals)}"
            )
    unknown = [name for name in names if name not in SIGNAL_TAGS]
    if unknown:
        raise InvariantError(f"signals: unknown {unknown}; known: {sorted(SIGNAL_TAGS)}")
    rows = flat.masked_row_counts() if any(name in _PER_ROW for name in names) else None
    columns = []
    for name in names:
        tag, dtype = SIGNAL_TAGS[name]
        arrays = [np.asarray(record.signals[name]) for record in records]
        lengths = _signal_lengths(name, flat, rows).tolist()
        for record, array, length in zip(records, arrays, lengths, strict=True):
            if array.shape != (length,):
                raise InvariantError(
                    f"trajectory {record.uid!r}: signal {name!r} must have shape ({length},), "
                    f"got {array.shape}",
                    record=record.uid,
                )
            _check_range(record.uid, name, array, dtype)
        columns.append(make_column(tag, dtype, np.concatenate(arrays)))
    return columns


_LARGEST = {Dtype.U24: 2**24 - 1, Dtype.U32: 2**32 - 1}


def _check_range(uid: str, name: str, array: NDArray[Any], dtype: Dtype) -> None:
    """Refuses integers that would wrap around in their column."""
    largest = _LARGEST.get(dtype)
    if largest is None or not array.size:
        return
    if array.dtype.kind not in "iu" or array.min() < 0 or array.max() > largest:
        raise InvariantError(
            f"trajectory {uid!r}: signal {name!r} must hold integers in 0..{largest}", record=uid
        )


def read_signals(read: ColumnReader, flat: Columns) -> list[dict[str, NDArray[Any]]]:
    """The signals of every record."""
    signals: list[dict[str, NDArray[Any]]] = [{} for _ in flat.uids]
    names = [name for name, (tag, _) in SIGNAL_TAGS.items() if tag in read.columns]
    rows = flat.masked_row_counts() if any(name in _PER_ROW for name in names) else None
    for name in names:
        tag, dtype = SIGNAL_TAGS[name]
        lengths = _signal_lengths(name, flat, rows)
        total = int(lengths.sum())
        values = read.tokens(tag, total) if dtype is Dtype.U24 else read.array(tag, total)
        values = values.astype(SIGNAL_DTYPES[name], copy=False)
        ends = np.cumsum(lengths).tolist()
        for i, length in enumerate(lengths.tolist()):
            signals[i][name] = values[ends[i] - length : ends[i]]
    return signals
