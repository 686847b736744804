"""The two members of a block as bytes: its records, and the features of their kept steps.

In layouts ``masked`` and ``logits`` only the positions that are masked before a kept step are
stored, half of them on average. Which these are follows from the record, so reading restores the
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lit_dlm.trajectories.features import ONLY_MASKED, StepFeatures, num_rows
from lit_dlm.trajectories.format import (
    NO_RUN,
    VERSION,
    Block,
    FeatureMetadata,
    known_columns,
    list_column,
    pack,
    raw_limit,
    read_block,
    record_batch,
    records_of,
    refusing,
    require,
    split_lists,
    unpack,
)
from lit_dlm.trajectories.record import Int32, Trajectory

_HALF = pa.list_(pa.float16())
_COLUMNS: dict[str, tuple[pa.DataType, ...]] = {
    "uid": (pa.string(),),
    "digest": (pa.binary(16),),
    "proposals": (pa.list_(pa.int32()),),
    "features": (pa.list_(pa.int8()), _HALF),
    "scales": (_HALF,),
}
_LISTS = ("proposals", "features", "scales")
_DENSE_SLACK = 256 << 20
"""Values to which a small block may always expand when the zeros of a layout are restored."""


def encode_members(
    records: Sequence[Trajectory],
    *,
    run_digest: bytes = NO_RUN,
    level: int = 9,
    metas: Sequence[str | None] | None = None,
    check: bool = True,
) -> tuple[bytes, bytes | None]:
    """Encodes records as a block and, if any of them has features, the member beside it.

    Arguments are those of :func:`record_batch`; ``level`` is that of zstd for the block.
    """
    batch = record_batch(records, run_digest=run_digest, metas=metas, check=check)
    has_features = any(record.features is not None for record in records)
    features = _encode_features(records, batch.column("digest")) if has_features else None
    return pack(batch, level=level), features


def decode_members(
    block: bytes | memoryview, features: bytes | memoryview | None, *, strict: bool = True
) -> tuple[Block, list[Trajectory]]:
    """Reads both members of a block; see :func:`records_of`."""
    read = read_block(block)
    records = records_of(read, strict=strict)
    if read.features is None:
        return read, records
    require(features is not None, "its features are missing")
    assert features is not None
    return read, attach_features(read, records, features)


def _encode_features(records: Sequence[Trajectory], digests: pa.Array) -> bytes:
    columns: dict[str, pa.Array] = {
        "uid": pa.array([record.uid for record in records]),
        "digest": digests,
    }
    rows = [_stored_rows(record) for record in records]
    for at, name in enumerate(_LISTS):
        parts = [None if row is None else row[at] for row in rows]
        if any(part is not None for part in parts):
            columns[name] = list_column(parts)
    batch = pa.record_batch(columns)
    # Features hardly compress, so a higher level would gain nothing.
    return pack(batch.replace_schema_metadata({"lit_dlm_trajectories": VERSION}), level=3)


def attach_features(
    block: Block, records: Sequence[Trajectory], data: bytes | memoryview
) -> list[Trajectory]:
    """Returns the records of a block, those with kept steps with their features."""
    batch = known_columns(unpack(data), _COLUMNS, tuple(_COLUMNS)[:4])
    # Features are matched by uid and content digest: a changed record must not get them. The
    # block's digests were compared with its records when these were read.
    is_same = all(batch[name].equals(block.batch[name]) for name in ("uid", "digest"))
    require(block.features and is_same, "its features are of other records")
    assert block.features is not None
    columns = {name: split_lists(batch[name]) for name in _LISTS if name in batch.schema.names}
    # Rows of zeros are not stored, so a small file could ask for any amount of them.
    budget = max(_DENSE_SLACK, raw_limit(len(data)))
    joined = []
    for i, (record, kept) in enumerate(zip(records, block.kept_steps, strict=True)):
        stored = {name: lists[i] for name, lists in columns.items()}
        if len(kept):
            rows = num_rows(block.features.layout, record.num_prompt, record.num_generated)
            budget -= len(kept) * rows * sum(block.features.groups)
            require(budget >= 0, "the rows of its features take more values than they may")
            features = _features(record, kept, rows, block.features, stored)
            record = replace(record, features=features)
        else:
            is_bare = not any(map(len, stored.values()))
            require(is_bare, f"{record.uid!r} has features, but kept no step")
        joined.append(record)
    return joined


def _features(
    record: Trajectory,
    kept: NDArray[np.int32],
    rows: int,
    metadata: FeatureMetadata,
    stored: dict[str, NDArray[Any]],
) -> StepFeatures:
    shape = (len(kept), rows)
    mask = None
    if metadata.layout in ONLY_MASKED:
        # Before its canvases are looked up, which a step outside would break off.
        is_inside = kept.max(initial=-1) < record.num_steps
        require(is_inside, f"the kept steps of {record.uid!r} do not fit")
        states, mask = _before(record, kept)

    def restored(name: str, width: int) -> NDArray[Any]:
        values = stored[name].reshape(-1, width)
        if mask is None:
            return values.reshape(*shape, width)
        array = np.zeros((*shape, width), dtype=values.dtype)
        array[mask] = values
        return array

    with refusing(f"features of {record.uid!r}"):
        proposals = restored("proposals", 1)[..., 0]
        features = StepFeatures(
            kept_steps=kept,
            features=restored("features", sum(metadata.groups)),
            scales=restored("scales", len(metadata.groups)) if "scales" in stored else None,
            groups=metadata.groups,
            # Where a token was already set, it is used as the proposal.
            proposals=proposals if mask is None else np.where(mask, proposals, states),
            layout=metadata.layout,  # type: ignore[arg-type]  # validated below
            projector_digest=metadata.projector,
        )
        features.validate(record.uid, record.num_prompt, record.num_generated, record.num_steps)
    return features


def _before(record: Trajectory, steps: NDArray[np.int32]) -> tuple[Int32, NDArray[np.bool_]]:
    """``(S, G)`` canvases before the given steps, and where they hold masks."""
    states = np.stack([record.state_at(int(step)) for step in steps])
    return states, states == record.mask_id


def only_masked(record: Trajectory, features: StepFeatures) -> StepFeatures:
    """Sets all other rows to zero; layout ``generation`` becomes ``masked``."""
    assert features.layout in ("generation", "logits")
    # Zeros where tokens stand, so that equal features have equal arrays whoever made them: a record
    # that was read back equals the one that was captured.
    states, masked = _before(record, features.kept_steps)

    def only(values: NDArray[Any]) -> NDArray[Any]:
        return np.where(masked[..., None], values, values.dtype.type(0))

    return replace(
        features,
        features=only(features.features),
        scales=None if features.scales is None else only(features.scales),
        proposals=np.where(masked, features.proposals, states),
        layout="masked" if features.layout == "generation" else features.layout,
    )


def _stored_rows(record: Trajectory) -> tuple[NDArray[Any] | None, ...] | None:
    """Returns proposals, features and (for int8) scales as flat arrays."""
    if (features := record.features) is None:
        return None
    chosen: Any = ...
    if features.layout in ONLY_MASKED:
        # What is not stored is read as zeros: anything else would be lost without a word.
        chosen = _before(record, features.kept_steps)[1]
        is_bare = not features.features[~chosen].any()
        rule = f"features in layout {features.layout!r} must be 0 where no mask is"
        require(is_bare, f"{record.uid!r}: {rule}")
    arrays = (features.proposals, features.features, features.scales)
    return tuple(None if array is None else array[chosen].reshape(-1) for array in arrays)
