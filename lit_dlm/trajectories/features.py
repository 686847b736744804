"""Features of kept steps as a second block beside the records' block.

The same container, with columns of its own. Records without features have a kept-step count of 0;
all others share one layout, one set of feature groups and one projector, which ``FMET`` names once.
The content digest of every record is repeated, so that features cannot be joined to other records.

====  ===========================================================================
FMET  one JSON object: layout, scheme, groups, projector
FCNT  u32, n: kept steps S of each record
FROW  u32, n: rows R per kept step (G, or P + G)
FSTP  u16, sum S: the kept steps
FPRP  u24, N: proposed tokens
FSCL  f16, N*(number of groups): scales of int8 features
FEAT  i8 or f16, N*F
====  ===========================================================================

N, the number of stored rows, is sum S*R; in layout ``masked`` it counts the response positions that
are masked before their step, which the record itself tells.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import mul
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from lit_dlm.trajectories.container import (
    Column,
    ColumnReader,
    Dtype,
    Header,
    make_column,
    pack,
    pack_texts,
    raw_limit,
    read_columns,
    split_texts,
    unpack,
)
from lit_dlm.trajectories.errors import (
    InvariantError,
    TrajectoryFormatError,
    UnsupportedFormatError,
)
from lit_dlm.trajectories.record import StepFeatures, Trajectory

_DTYPES: dict[str, tuple[Dtype, ...]] = {
    "SMID": (Dtype.BYTES,),
    "CDIG": (Dtype.BYTES,),
    "FMET": (Dtype.BYTES,),
    "FCNT": (Dtype.U32,),
    "FROW": (Dtype.U32,),
    "FSTP": (Dtype.U16,),
    "FPRP": (Dtype.U24,),
    "FSCL": (Dtype.F16,),
    "FEAT": (Dtype.I8, Dtype.F16),
}


_DENSE_SLACK = 256 << 20
"""Values that a small block in layout ``masked`` may take when its zeros are put back."""


def encode_features(
    records: Sequence[Trajectory], *, run_digest: bytes = b"\0" * 16, level: int = 3
) -> bytes:
    """Writes the features of a block of records.

    Args:
        records: the records of the block, in its order; at least one has features.
        run_digest: 16 bytes that name the run.
        level: zstd level. Features hardly shrink, so a high one buys nothing.

    Returns:
        The bytes of the features block.

    Raises:
        ValueError: If no record has features, or two differ in layout, groups or projector.
    """
    kept = [(record, record.features) for record in records if record.features is not None]
    if not kept:
        raise ValueError("encode_features: no record has features")
    facts = _facts(kept[0][1])
    for record, features in kept:
        features.validate(record.uid, record.num_prompt, record.num_generated, record.num_steps)
        if _facts(features) != facts:
            raise InvariantError(
                f"trajectory {record.uid!r}: all features of a block need one layout, "
                f"expected {facts}, got {_facts(features)}"
            )
    # All records have scales, or none has: it is one of the facts.
    values, proposals, *scales = map(
        np.concatenate, zip(*(_stored_rows(*one) for one in kept), strict=True)
    )
    counts = [0 if r.features is None else r.features.num_kept for r in records]
    rows = [0 if r.features is None else r.features.proposals.shape[1] for r in records]
    text = json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()
    columns = [
        Column("SMID", Dtype.BYTES, pack_texts("<H", [r.uid.encode() for r in records])),
        Column("CDIG", Dtype.BYTES, b"".join(r.digest() for r in records)),
        Column("FMET", Dtype.BYTES, pack_texts("<I", [text])),
        make_column("FCNT", Dtype.U32, np.array(counts)),
        make_column("FROW", Dtype.U32, np.array(rows)),
        make_column("FSTP", Dtype.U16, np.concatenate([f.kept_steps for _, f in kept])),
        make_column("FPRP", Dtype.U24, proposals),
        *(make_column("FSCL", Dtype.F16, one) for one in scales),
        make_column("FEAT", Dtype.I8 if scales else Dtype.F16, values),
    ]
    header = Header(
        num_records=len(records),
        flags=0,
        mask_id=records[0].mask_id,
        vocab_size=records[0].vocab_size,
        run_digest=run_digest,
    )
    return pack(header, columns, level=level)


def attach_features(
    records: Sequence[Trajectory],
    data: bytes | memoryview,
) -> list[Trajectory]:
    """Joins a features block to the records it belongs to.

    Args:
        records: the decoded records of the same key.
        data: the features block.

    Returns:
        The records, those with kept steps carrying their features (views of the block's columns).

    Raises:
        TrajectoryFormatError: If the bytes are damaged or belong to other records.
    """
    header, columns = unpack(data, known=tuple(_DTYPES))
    n = header.num_records
    missing = [tag for tag in _DTYPES if tag not in columns and tag != "FSCL"]
    if missing:
        raise TrajectoryFormatError(f"features block: columns {missing} are missing")
    if n != len(records):
        raise InvariantError(f"features block: {n} records, the record block has {len(records)}")
    read = ColumnReader(columns, _DTYPES)
    # Features belong to a record by its name and its content: a changed one must not have them.
    uids = split_texts("<H", columns["SMID"], n)
    digests = read.raw("CDIG", 16 * n)
    for i, record in enumerate(records):
        if uids[i] != record.uid.encode() or digests[16 * i : 16 * i + 16] != record.digest():
            raise InvariantError(f"features block: its record {i} is not {record.uid!r}")
    facts = _read_facts(split_texts("<I", columns["FMET"], 1)[0])
    groups: tuple[int, ...] = tuple(facts["groups"])
    F, int8 = sum(groups), facts["scheme"] == "int8"
    if (columns["FEAT"].dtype is Dtype.I8) is not int8 or ("FSCL" in columns) is not int8:
        raise InvariantError("features block: element type and scheme do not fit")
    counts, rows = read.integers("FCNT", n), read.integers("FROW", n)
    steps = read.array("FSTP", int(counts.sum())).astype(np.int32)
    ends = np.cumsum(counts)
    dense = sum(map(mul, counts.tolist(), rows.tolist())) * F
    if facts["layout"] == "masked" and dense > max(_DENSE_SLACK, raw_limit(len(data))):
        raise InvariantError(
            f"features block: its rows take {dense} values, more than a block of {len(data)} bytes "
            "may"
        )
    masks: list[NDArray[np.bool_] | None] = [None] * n
    cells = counts * rows
    # Which cells are stored is not: it follows from the record.
    if facts["layout"] == "masked":
        for i, record in enumerate(records):
            if counts[i]:
                mask = _masked(record, steps[ends[i] - counts[i] : ends[i]], int(rows[i]))
                masks[i], cells[i] = mask, int(mask.sum())
    total = int(cells.sum())
    proposals = read.tokens("FPRP", total)
    features = read.array("FEAT", total * F)
    scales = read.array("FSCL", total * len(groups)) if int8 else None
    cell_ends = np.cumsum(cells).tolist()
    joined = []
    for i, record in enumerate(records):
        S, R = int(counts[i]), int(rows[i])
        if S == 0:
            joined.append(record)
            continue
        first, last = cell_ends[i] - int(cells[i]), cell_ends[i]
        own = None
        if scales is not None:
            own = _restored(scales, first, last, (S, R, len(groups)), masks[i])
        kept = steps[ends[i] - S : ends[i]]
        tokens = proposals[first:last]
        if masks[i] is None:
            tokens = tokens.reshape(S, R)
        else:  # where a token stood already, it stands for the proposal
            standing = np.stack([record.state_at(int(step)) for step in kept])
            standing[masks[i]] = tokens
            tokens = standing
        part = StepFeatures(
            kept_steps=kept,
            features=_restored(features, first, last, (S, R, F), masks[i]),
            scales=own,
            groups=groups,
            proposals=tokens,
            layout=facts["layout"],
            projector_digest=facts["projector"],
        )
        try:
            part.validate(record.uid, record.num_prompt, record.num_generated, record.num_steps)
        except ValueError as error:
            raise InvariantError(f"features block: {error}") from error
        joined.append(replace(record, features=part))
    return joined


def only_masked(record: Trajectory, features: StepFeatures) -> StepFeatures:
    """Features in layout ``masked``, from ones of all response rows.

    Args:
        record: the record they belong to.
        features: in layout ``generation``.

    Returns:
        The same features with zeros at rows that are not masked before their step.

    Raises:
        ValueError: If the layout is another one.
    """
    if features.layout != "generation":
        raise ValueError(
            f"trajectory {record.uid!r}: expected features in layout 'generation', "
            f"got {features.layout!r}"
        )
    states = np.stack([record.state_at(int(step)) for step in features.kept_steps])
    masked = states == record.mask_id
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


def _stored_rows(record: Trajectory, features: StepFeatures) -> tuple[NDArray[Any], ...]:
    """The flat columns of one record's features: features, proposals, and scales of int8."""
    chosen: Any = ...
    if features.layout == "masked":
        chosen = _masked(record, features.kept_steps, record.num_generated)
        if features.features[~chosen].any():
            raise InvariantError(
                f"trajectory {record.uid!r}: features in layout 'masked' must be 0 where no mask is"
            )
    arrays = (features.features, features.proposals, features.scales)
    return tuple(array[chosen].reshape(-1) for array in arrays if array is not None)


def _masked(record: Trajectory, steps: NDArray[np.int32], rows: int) -> NDArray[np.bool_]:
    """``(S, R)`` bool: response positions that are masked before each kept step."""
    if rows != record.num_generated or not ((steps >= 0) & (steps < record.num_steps)).all():
        raise InvariantError(f"features block: kept steps and rows do not fit {record.uid!r}")
    states = np.stack([record.state_at(int(step)) for step in steps])
    masked: NDArray[np.bool_] = states == record.mask_id
    return masked


@dataclass(frozen=True, eq=False)
class FeatureOutline:
    """What a features block says about its records besides the features."""

    steps: list[NDArray[np.int32]]
    """``n`` arrays ``(S,)``, empty for records without features."""
    layout: str
    groups: tuple[int, ...]
    projector_digest: str


def read_feature_outline(file: BinaryIO, offset: int, size: int) -> FeatureOutline:
    """Reads the small columns of a features block in a file, and not its features.

    Args:
        file: open for reading.
        offset: first byte of the block.
        size: bytes of the block.

    Raises:
        TrajectoryFormatError: If a column that is read is damaged or missing.
    """
    tags = ("FMET", "FCNT", "FSTP")
    header, columns = read_columns(file, offset, size, known=tuple(_DTYPES), wanted=tags)
    missing = [tag for tag in tags if tag not in columns]
    if missing:
        raise InvariantError(f"features block: columns {missing} are missing")
    read = ColumnReader(columns, _DTYPES)
    facts = _read_facts(split_texts("<I", columns["FMET"], 1)[0])
    counts = read.integers("FCNT", header.num_records)
    steps = read.array("FSTP", int(counts.sum())).astype(np.int32)
    return FeatureOutline(
        np.split(steps, np.cumsum(counts)[:-1]),
        facts["layout"],
        tuple(facts["groups"]),
        facts["projector"],
    )


def _restored(
    flat: NDArray[Any],
    first: int,
    last: int,
    shape: tuple[int, int, int],
    mask: NDArray[np.bool_] | None,
) -> NDArray[Any]:
    """Stored rows ``first .. last`` in their places; zeros elsewhere."""
    stored = flat[first * shape[2] : last * shape[2]]
    if mask is None:
        return stored.reshape(shape)
    array = np.zeros(shape, dtype=flat.dtype)
    array[mask] = stored.reshape(-1, shape[2])
    return array


def _facts(features: StepFeatures) -> dict[str, Any]:
    return {
        "layout": features.layout,
        "scheme": features.scheme,
        "groups": list(features.groups),
        "projector": features.projector_digest,
    }


def _read_facts(text: bytes) -> dict[str, Any]:
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TrajectoryFormatError(f"features block: FMET is not JSON: {error}") from error
    if isinstance(facts, dict) and facts.get("scheme") == "int8_channel":
        raise UnsupportedFormatError(
            "features block: its scheme is int8_channel (one scale per feature); only version 0.1 "
            "of lit-dlm could read it"
        )
    fits = (
        isinstance(facts, dict)
        and facts.get("layout") in ("generation", "all", "masked")
        and facts.get("scheme") in ("fp16", "int8")
        and isinstance(facts.get("projector"), str)
        and isinstance(facts.get("groups"), list)
        and all(type(size) is int and 0 < size < 2**24 for size in facts["groups"])
    )
    if not fits:
        raise TrajectoryFormatError(f"features block: FMET does not hold what it must: {facts}")
    return dict(facts)
