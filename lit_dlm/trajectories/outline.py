"""What an index of a set needs to know about a block, without reading its long columns.

A features member of 64 records can be 30 MB, of which the numbers of the kept steps are 2 kB. An
outline reads header, directory and the few small columns by offset, each against its checksum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from lit_dlm.trajectories.codec import DTYPES, read_given
from lit_dlm.trajectories.column_io import ColumnReader, unpack_texts
from lit_dlm.trajectories.container import read_columns
from lit_dlm.trajectories.errors import InvariantError
from lit_dlm.trajectories.feature_codec import KeptSteps, read_kept_steps
from lit_dlm.trajectories.record_fields import read_metas
from lit_dlm.trajectories.shard_files import BlockEntry


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockOutline:
    """Facts about the ``n`` records of a block, in their order."""

    uids: list[str]
    """``n`` names."""
    num_steps: NDArray[np.int64]
    """``(n,)`` executed steps."""
    metas: list[dict[str, Any]]
    """``n`` metas, empty where a record has none."""
    has_written: NDArray[np.bool_] | None
    """``(n,)``: some step wrote a token that stands at the end. ``None`` if not asked for."""
    features: KeptSteps | None
    """The kept steps and the layout of their features; ``None`` where the block has none, or they
    were not asked for."""


def read_outline(
    file: BinaryIO,
    entry: BlockEntry,
    *,
    features: bool,
    written: bool,
    dictionaries: Mapping[int, bytes] | None = None,
) -> BlockOutline:
    """Reads the outline of a block.

    Args:
        file: the shard, open for reading.
        entry: where the block lies.
        features: also read the kept steps of the features member.
        written: also find the records that have written tokens.
        dictionaries: zstd dictionaries by id.

    Returns:
        The outline.

    Raises:
        TrajectoryFormatError: If a column that is read is damaged.
    """
    tags: Sequence[str] = ("SMID", "NSTP", "META")
    if written:
        tags = (*tags, "GLEN", "GTOK", "GIVN")
    header, columns = read_columns(
        file,
        entry.offset,
        entry.size,
        known=DTYPES,
        wanted=tags,
        dictionaries=dictionaries,
    )
    n = header.num_records
    missing = [tag for tag in tags if tag not in columns and tag not in ("META", "GIVN")]
    if missing:
        raise InvariantError(f"block: columns {missing} are missing")
    read = ColumnReader(columns, DTYPES)
    has_written = None
    if written:
        lengths = read.integers("GLEN", n)
        size = int(lengths.sum())
        # Without a given token, whatever is no mask was written.
        cells = read.tokens("GTOK", size) != header.mask_id
        given = read_given(columns.get("GIVN"), size)
        if given is not None:
            cells &= ~given
        record = np.repeat(np.arange(n), lengths)
        has_written = np.bincount(record, weights=cells, minlength=n) > 0
    kept = None
    if features and entry.feature_offset is not None and entry.feature_size is not None:
        kept = read_kept_steps(file, entry.feature_offset, entry.feature_size)
        if len(kept.steps) != n:
            raise InvariantError(f"features block: {len(kept.steps)} records, expected {n}")
    return BlockOutline(
        uids=unpack_texts("<H", columns["SMID"], n),
        num_steps=read.integers("NSTP", n),
        metas=read_metas(columns.get("META"), n),
        has_written=has_written,
        features=kept,
    )
