"""Features of kept steps in a member of their own, packed like the block that it belongs to.

One row for each record of the block, in its order: ``uid`` and ``digest`` again, so that features
cannot be joined to other records, and ``proposals``, ``features`` and, for int8, ``scales`` as
lists, null for a record without features. The block says which steps were kept, and names layout,
feature groups and projector.

A list holds the stored rows back to back: ``S R`` of them, or in layout ``masked`` the response
positions that are masked before each kept step, which the record tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lit_dlm.trajectories.format import (
    VERSION,
    Block,
    feature_facts,
    known_columns,
    list_column,
    pack,
    raw_limit,
    refusing,
    require,
    split_lists,
    unpack,
)
from lit_dlm.trajectories.record import Int32, StepFeatures, Trajectory

_HALF = pa.list_(pa.float16())
_COLUMNS: dict[str, tuple[pa.DataType, ...]] = {
    "uid": (pa.string(),),
    "digest": (pa.binary(16),),
    "proposals": (pa.list_(pa.int32()),),
    "features": (pa.list_(pa.int8()), _HALF),
    "scales": (_HALF,),
}
_DENSE_SLACK = 256 << 20
"""Values that a small block in layout ``masked`` may take when its zeros are put back."""


def encode_features(records: Sequence[Trajectory]) -> bytes:
    """Writes the features of a block of records, of which at least one has some."""
    assert feature_facts(records) is not None, "encode_features: no record has features"
    columns: dict[str, pa.Array] = {
        "uid": pa.array([record.uid for record in records]),
        "digest": pa.array([record.digest() for record in records], pa.binary(16)),
    }
    rows = [_stored_rows(record) for record in records]
    for at, name in enumerate(("proposals", "features", "scales")):
        parts = [None if row is None else row[at] for row in rows]
        if any(part is not None for part in parts):
            columns[name] = list_column(parts)
    batch = pa.record_batch(columns)
    # They hardly shrink, so a high level would buy nothing.
    return pack(batch.replace_schema_metadata({"lit_dlm_trajectories": VERSION}), level=3)


def attach_features(
    block: Block, records: Sequence[Trajectory], data: bytes | memoryview
) -> list[Trajectory]:
    """The records of a block, those with kept steps with their features, views of the member."""
    batch = known_columns(unpack(data), _COLUMNS, tuple(_COLUMNS)[:4])
    # Features belong to a record by its name and its content: a changed one must not have them.
    named = zip(batch.column("uid").to_pylist(), batch.column("digest").to_pylist(), strict=True)
    expected = [(record.uid, record.digest()) for record in records]
    require(
        block.features is not None and list(named) == expected, "its features are of other records"
    )
    assert block.features is not None
    columns = {
        name: split_lists(batch.column(name))
        for name in ("proposals", "features", "scales")
        if name in batch.schema.names
    }
    steps, facts = block.kept_steps, block.features
    budget = max(_DENSE_SLACK, raw_limit(len(data)))
    joined = []
    for i, (record, kept) in enumerate(zip(records, steps, strict=True)):
        if len(kept):
            own = {name: lists[i] for name, lists in columns.items()}
            rows = record.num_generated + (record.num_prompt if facts.layout == "all" else 0)
            budget -= len(kept) * rows * sum(facts.groups)
            require(budget >= 0, "the rows of its features take more values than they may")
            record = replace(record, features=_features(record, kept, rows, block, own))
        else:
            is_bare = not any(len(lists[i]) for lists in columns.values())
            require(is_bare, f"{record.uid!r} has features, but kept no step")
        joined.append(record)
    return joined


def _features(
    record: Trajectory,
    kept: NDArray[np.int32],
    rows: int,
    block: Block,
    stored: dict[str, NDArray[Any]],
) -> StepFeatures:
    facts = block.features
    assert facts is not None
    shape = (len(kept), rows)
    mask = None
    if facts.layout == "masked":
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
            features=restored("features", sum(facts.groups)),
            scales=restored("scales", len(facts.groups)) if "scales" in stored else None,
            groups=facts.groups,
            # Where a token stood already, it stands for the proposal.
            proposals=proposals if mask is None else np.where(mask, proposals, states),
            layout=facts.layout,  # type: ignore[arg-type]  # validated below
            projector_digest=facts.projector,
        )
        features.validate(record.uid, record.num_prompt, record.num_generated, record.num_steps)
    return features


def _before(record: Trajectory, steps: NDArray[np.int32]) -> tuple[Int32, NDArray[np.bool_]]:
    """``(S, G)`` canvases before some steps, and where they hold masks."""
    states = np.stack([record.state_at(int(step)) for step in steps])
    return states, states == record.mask_id


def only_masked(record: Trajectory, features: StepFeatures) -> StepFeatures:
    """Features in layout ``masked``, from ones of layout ``generation``: zeros at other rows."""
    assert features.layout == "generation"
    states, masked = _before(record, features.kept_steps)
    scales = features.scales
    if scales is not None:
        scales = np.where(masked[..., None], scales, np.float16(0))
    return replace(
        features,
        features=np.where(masked[..., None], features.features, features.features.dtype.type(0)),
        scales=scales,
        proposals=np.where(masked, features.proposals, states),
        layout="masked",
    )


def _stored_rows(record: Trajectory) -> tuple[NDArray[Any] | None, ...] | None:
    """Proposals, features, and scales of int8 as flat arrays."""
    if (features := record.features) is None:
        return None
    chosen: Any = ...
    if features.layout == "masked":
        chosen = _before(record, features.kept_steps)[1]
        is_bare = not features.features[~chosen].any()
        require(is_bare, f"{record.uid!r}: features in layout 'masked' must be 0 where no mask is")
    arrays = (features.proposals, features.features, features.scales)
    return tuple(None if array is None else array[chosen].reshape(-1) for array in arrays)
