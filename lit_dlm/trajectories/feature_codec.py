"""Features of kept steps as a second block beside the records' block.

The same container, with columns of its own. Records without features have a kept-step count of 0;
all others share one layout, one set of feature groups and one projector, which ``FMET`` names once.
The content digest of every record is repeated, so that features cannot be joined to other records.

====  ===========================================================================
FMET  one JSON object: layout, scheme, groups, projector
FCNT  u32, n: kept steps S of each record
FROW  u32, n: rows R per kept step (G, or P + G)
FSTP  u16, sum S: the kept steps
FPRP  u24, sum S*R: proposed tokens
FSCL  f16, sum S*R*(number of groups): scales of int8 features
FEAT  i8 or f16, sum S*R*F
====  ===========================================================================
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_dlm.trajectories.column_io import ColumnReader, make_column, pack_texts, split_texts
from lit_dlm.trajectories.container import MAX_RAW_BYTES, Column, Dtype, Header, pack, unpack
from lit_dlm.trajectories.errors import InvariantError, TrajectoryFormatError
from lit_dlm.trajectories.features import StepFeatures
from lit_dlm.trajectories.record import Trajectory

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
    parts = [features for _, features in kept]
    counts = [0 if r.features is None else r.features.num_kept for r in records]
    rows = [0 if r.features is None else r.features.proposals.shape[1] for r in records]
    text = json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()
    columns = [
        Column("SMID", Dtype.BYTES, pack_texts("<H", [r.uid.encode() for r in records])),
        Column("CDIG", Dtype.BYTES, b"".join(r.digest() for r in records)),
        Column("FMET", Dtype.BYTES, pack_texts("<I", [text])),
        make_column("FCNT", Dtype.U32, np.array(counts)),
        make_column("FROW", Dtype.U32, np.array(rows)),
        make_column("FSTP", Dtype.U16, np.concatenate([f.kept_steps for f in parts])),
        make_column("FPRP", Dtype.U24, np.concatenate([f.proposals.reshape(-1) for f in parts])),
    ]
    scales = [f.scales.reshape(-1) for f in parts if f.scales is not None]
    if scales:
        columns.append(make_column("FSCL", Dtype.F16, np.concatenate(scales)))
    columns.append(
        make_column(
            "FEAT",
            Dtype.I8 if scales else Dtype.F16,
            np.concatenate([f.features.reshape(-1) for f in parts]),
        )
    )
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
    *,
    max_raw_bytes: int = MAX_RAW_BYTES,
) -> list[Trajectory]:
    """Joins a features block to the records it belongs to.

    Args:
        records: the decoded records of the same key.
        data: the features block.
        max_raw_bytes: refuse a block that unpacks to more than this.

    Returns:
        The records, those with kept steps carrying their features (views of the block's columns).

    Raises:
        TrajectoryFormatError: If the bytes are damaged or belong to other records.
    """
    header, columns = unpack(data, known=tuple(_DTYPES), max_raw_bytes=max_raw_bytes)
    n = header.num_records
    missing = [tag for tag in _DTYPES if tag not in columns and tag != "FSCL"]
    if missing:
        raise TrajectoryFormatError(f"features block: columns {missing} are missing")
    if n != len(records):
        raise InvariantError(f"features block: {n} records, the record block has {len(records)}")
    read = ColumnReader(columns, _DTYPES)
    uids = split_texts("<H", columns["SMID"], n)
    digests = read.raw("CDIG", 16 * n)
    for i, record in enumerate(records):
        if uids[i] != record.uid.encode() or digests[16 * i : 16 * i + 16] != record.digest():
            raise InvariantError(f"features block: its record {i} is not {record.uid!r}")
    facts = _read_facts(split_texts("<I", columns["FMET"], 1)[0])
    groups: tuple[int, ...] = tuple(facts["groups"])
    num_features, int8 = sum(groups), facts["scheme"] == "int8"
    if (columns["FEAT"].dtype is Dtype.I8) is not int8 or ("FSCL" in columns) is not int8:
        raise InvariantError("features block: element type and scheme do not fit")
    counts, rows = read.integers("FCNT", n), read.integers("FROW", n)
    cells = counts * rows
    total = int(cells.sum())
    steps = read.array("FSTP", int(counts.sum())).astype(np.int32)
    proposals = read.tokens("FPRP", total)
    features = read.array("FEAT", total * num_features)
    scales = read.array("FSCL", total * len(groups)) if int8 else None
    ends, cell_ends = np.cumsum(counts).tolist(), np.cumsum(cells).tolist()
    joined = []
    for i, record in enumerate(records):
        S, R = int(counts[i]), int(rows[i])
        if S == 0:
            joined.append(record)
            continue
        last, first = cell_ends[i], cell_ends[i] - S * R
        part = StepFeatures(
            kept_steps=steps[ends[i] - S : ends[i]],
            features=_cells(features, first, last, (S, R, num_features)),
            scales=None if scales is None else _cells(scales, first, last, (S, R, len(groups))),
            groups=groups,
            proposals=proposals[first:last].reshape(S, R),
            layout=facts["layout"],
            projector_digest=facts["projector"],
        )
        try:
            part.validate(record.uid, record.num_prompt, record.num_generated, record.num_steps)
        except ValueError as error:
            raise InvariantError(f"features block: {error}") from error
        joined.append(replace(record, features=part))
    return joined


def _cells(flat: NDArray[Any], first: int, last: int, shape: tuple[int, int, int]) -> NDArray[Any]:
    width = shape[2]
    return flat[first * width : last * width].reshape(shape)


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
    fits = (
        isinstance(facts, dict)
        and facts.get("layout") in ("generation", "all")
        and facts.get("scheme") in ("fp16", "int8")
        and isinstance(facts.get("projector"), str)
        and isinstance(facts.get("groups"), list)
        and all(type(size) is int and 0 < size < 2**24 for size in facts["groups"])
    )
    if not fits:
        raise TrajectoryFormatError(f"features block: FMET does not hold what it must: {facts}")
    return dict(facts)
