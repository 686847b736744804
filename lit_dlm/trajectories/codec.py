"""Format v1 of trajectories: records to bytes and back.

A block holds 1 to 65,535 records as columns (see :mod:`lit_dlm.trajectories.container` for the byte
layout). Records are method-neutral: prompt, final tokens, commit steps, superseded writes, seeds,
and optional signal columns. Features of kept steps live in a second member, see
:mod:`lit_dlm.trajectories.feature_codec`.

One convention differs from the record in memory: the commit step column stores 0 where nothing was
ever written, since it is unsigned. Such a position holds the mask id and has no earlier write; a
given position is named by its own bit column. Both get back -1 on reading.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_dlm.trajectories.column_io import (
    ColumnReader,
    make_column,
    pack_texts,
    split_texts,
    unpack_texts,
)
from lit_dlm.trajectories.columns import MAX_LENGTH, STATUSES, Columns, flatten
from lit_dlm.trajectories.container import MAX_RAW_BYTES, Column, Dtype, Header, pack, unpack
from lit_dlm.trajectories.errors import ChecksumError, InvariantError, TrajectoryFormatError
from lit_dlm.trajectories.record import DIGEST_TAG, Trajectory, trusted
from lit_dlm.trajectories.signal_codec import SIGNAL_TAGS, read_signals, signal_columns

FLAG_PARTIAL = 0x0001
"""Block flag: some record was cut by a step limit or aborted."""
FLAG_FEATURES = 0x10000
"""Block flag, of the half that readers may ignore: a features member belongs to this block."""

_DTYPES: dict[str, tuple[Dtype, ...]] = {
    "SMID": (Dtype.BYTES,),
    "PLEN": (Dtype.U16,),
    "GLEN": (Dtype.U16,),
    "NSTP": (Dtype.U16,),
    "PTOK": (Dtype.U24,),
    "GTOK": (Dtype.U24,),
    "CSTP": (Dtype.U8, Dtype.U16),
    "GIVN": (Dtype.BYTES,),
    "ECNT": (Dtype.U32,),
    "ESTP": (Dtype.U16,),
    "EPOS": (Dtype.U16,),
    "ETOK": (Dtype.U24,),
    "SEED": (Dtype.U64,),
    "CDIG": (Dtype.BYTES,),
    "STAT": (Dtype.U8,),
    "META": (Dtype.BYTES,),
    **{tag: (dtype,) for tag, dtype in SIGNAL_TAGS.values()},
}
_REQUIRED = ("SMID", "PLEN", "GLEN", "NSTP", "PTOK", "GTOK", "CSTP", "SEED", "CDIG", "STAT")
_EVENTS = ("ECNT", "ESTP", "EPOS", "ETOK")


def encode_block(
    records: Sequence[Trajectory], *, run_digest: bytes = b"\0" * 16, level: int = 9
) -> bytes:
    """Writes records as one block. Features are not part of it.

    Args:
        records: 1 to 65,535 records with one mask id, vocabulary size and set of signals.
        run_digest: 16 bytes that name the run (see ``RunRecord.digest``).
        level: zstd level.

    Returns:
        The bytes of the block.

    Raises:
        ValueError: If a record breaks a rule of the format (named), or the block has no record.
    """
    if not 1 <= len(records) <= MAX_LENGTH:
        raise ValueError(f"encode_block: expected 1 to {MAX_LENGTH} records, got {len(records)}")
    if len(run_digest) != 16:
        raise ValueError(f"encode_block: run_digest must have 16 bytes, got {len(run_digest)}")
    flat = flatten(records)
    flat.check()
    statuses = _status_codes(records)
    cstp = np.maximum(flat.commit_step, 0)
    narrow = int(flat.num_steps.max()) <= 256
    columns = [
        Column("SMID", Dtype.BYTES, pack_texts("<H", [_uid_bytes(r.uid) for r in records])),
        make_column("PLEN", Dtype.U16, flat.num_prompt),
        make_column("GLEN", Dtype.U16, flat.num_generated),
        make_column("NSTP", Dtype.U16, flat.num_steps),
        make_column("PTOK", Dtype.U24, flat.prompts),
        make_column("GTOK", Dtype.U24, flat.tokens),
        make_column("CSTP", Dtype.U8 if narrow else Dtype.U16, cstp),
        make_column("SEED", Dtype.U64, _seeds(records)),
        Column("CDIG", Dtype.BYTES, b"".join(_digests(flat))),
        make_column("STAT", Dtype.U8, statuses),
    ]
    if flat.given is not None:
        bits = np.packbits(flat.given, bitorder="little").tobytes()
        columns.append(Column("GIVN", Dtype.BYTES, bits))
    if len(flat.events):
        columns += [
            make_column("ECNT", Dtype.U32, flat.num_events),
            make_column("ESTP", Dtype.U16, flat.events[:, 0]),
            make_column("EPOS", Dtype.U16, flat.events[:, 1]),
            make_column("ETOK", Dtype.U24, flat.events[:, 2]),
        ]
    if any(r.meta for r in records):
        columns.append(
            Column("META", Dtype.BYTES, pack_texts("<I", [_meta_bytes(r) for r in records]))
        )
    columns += signal_columns(records, flat)
    flags = FLAG_PARTIAL if (statuses >= 2).any() else 0
    if any(record.features is not None for record in records):
        flags |= FLAG_FEATURES
    header = Header(
        num_records=len(records),
        flags=flags,
        mask_id=flat.mask_id,
        vocab_size=flat.vocab_size,
        run_digest=run_digest,
    )
    return pack(header, columns, level=level)


def decode_block(
    data: bytes | memoryview, *, strict: bool = True, max_raw_bytes: int = MAX_RAW_BYTES
) -> list[Trajectory]:
    """Reads a block.

    The arrays of the records are views of the block's columns.

    Args:
        data: exactly one block.
        strict: also check every rule of the format and each record's content digest. Checksums,
            lengths and structure are always checked.
        max_raw_bytes: refuse a block whose columns unpack to more than this.

    Returns:
        The records in their stored order.

    Raises:
        TrajectoryFormatError: Or one of its kinds, whatever is wrong with the bytes.
    """
    header, columns = unpack(data, known=tuple(_DTYPES), max_raw_bytes=max_raw_bytes)
    n = header.num_records
    if not 1 <= n <= MAX_LENGTH:
        raise TrajectoryFormatError(f"block: expected 1 to {MAX_LENGTH} records, got {n}")
    missing = [tag for tag in _REQUIRED if tag not in columns]
    present = [tag for tag in _EVENTS if tag in columns]
    if missing or len(present) not in (0, len(_EVENTS)):
        raise TrajectoryFormatError(f"block: columns {missing or present} are missing or alone")
    read = ColumnReader(columns, _DTYPES)
    num_prompt = read.integers("PLEN", n)
    num_generated = read.integers("GLEN", n)
    num_steps = read.integers("NSTP", n)
    size = int(num_generated.sum())
    tokens = read.tokens("GTOK", size)
    commit_step = read.array("CSTP", size).astype(np.int32)
    given = _read_given(columns.get("GIVN"), size)
    num_events = read.integers("ECNT", n) if present else np.zeros(n, dtype=np.int64)
    events = _read_events(read, int(num_events.sum())) if present else _NO_EVENTS
    uids = unpack_texts("<H", columns["SMID"], n)
    flat = Columns(
        uids=uids,
        num_prompt=num_prompt,
        num_generated=num_generated,
        num_steps=num_steps,
        prompts=read.tokens("PTOK", int(num_prompt.sum())),
        tokens=tokens,
        commit_step=commit_step,
        given=given,
        num_events=num_events,
        events=events,
        mask_id=header.mask_id,
        vocab_size=header.vocab_size,
    )
    _restore_unwritten(flat)
    statuses = read.array("STAT", n)
    if statuses.max() >= len(STATUSES):
        raise InvariantError(f"block: unknown status code {statuses.max()}")
    seeds = read.array("SEED", n)
    if strict:
        _check_strictly(flat, statuses, header, read.raw("CDIG", 16 * n))
    metas = _unpack_metas(columns.get("META"), n)
    signals = read_signals(read, flat)
    return _split(flat, statuses, seeds, metas, signals)


def _split(
    flat: Columns,
    statuses: NDArray[np.uint8],
    seeds: NDArray[np.uint64],
    metas: list[dict[str, Any]],
    signals: list[dict[str, NDArray[Any]]],
) -> list[Trajectory]:
    ends = np.cumsum(flat.num_generated).tolist()
    prompt_ends = np.cumsum(flat.num_prompt).tolist()
    event_ends = np.cumsum(flat.num_events).tolist()
    num_steps, seed_list, codes = flat.num_steps.tolist(), seeds.tolist(), statuses.tolist()
    records = []
    start = prompt_start = event_start = 0
    for i, uid in enumerate(flat.uids):
        end, prompt_end, event_end = ends[i], prompt_ends[i], event_ends[i]
        given = None if flat.given is None else flat.given[start:end]
        records.append(
            trusted(
                uid=uid,
                prompt_ids=flat.prompts[prompt_start:prompt_end],
                tokens=flat.tokens[start:end],
                commit_step=flat.commit_step[start:end],
                num_steps=num_steps[i],
                mask_id=flat.mask_id,
                vocab_size=flat.vocab_size,
                seed=seed_list[i],
                status=STATUSES[codes[i]],
                given=given if given is not None and given.any() else None,
                superseded=flat.events[event_start:event_end] if event_end > event_start else None,
                signals=signals[i],
                features=None,
                meta=metas[i],
            )
        )
        start, prompt_start, event_start = end, prompt_end, event_end
    return records


_NO_EVENTS = np.empty((0, 3), dtype=np.int32)


def _status_codes(records: Sequence[Trajectory]) -> NDArray[np.uint8]:
    for record in records:
        if record.status not in STATUSES:
            raise InvariantError(
                f"trajectory {record.uid!r}: status must be one of {STATUSES}, "
                f"got {record.status!r}"
            )
    return np.array([STATUSES.index(record.status) for record in records], dtype=np.uint8)


def _seeds(records: Sequence[Trajectory]) -> NDArray[np.uint64]:
    for record in records:
        if not 0 <= record.seed < 2**64:
            raise InvariantError(
                f"trajectory {record.uid!r}: seed must be in 0..2**64-1, got {record.seed}"
            )
    return np.array([record.seed for record in records], dtype=np.uint64)


def _uid_bytes(uid: str) -> bytes:
    data = uid.encode()
    if not 1 <= len(data) <= MAX_LENGTH:
        raise InvariantError(f"uid {uid[:40]!r}: expected 1 to 65535 bytes, got {len(data)}")
    return data


def _meta_bytes(record: Trajectory) -> bytes:
    if not record.meta:
        return b""
    try:
        text = json.dumps(
            record.meta, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
    except (TypeError, ValueError) as error:
        raise InvariantError(f"trajectory {record.uid!r}: meta is not JSON: {error}") from error
    return text.encode()


def _unpack_metas(column: Column | None, n: int) -> list[dict[str, Any]]:
    if column is None:
        return [{} for _ in range(n)]
    try:
        metas = [json.loads(text) if text else {} for text in split_texts("<I", column, n)]
    except (ValueError, RecursionError) as error:
        if isinstance(error, TrajectoryFormatError):
            raise
        raise TrajectoryFormatError(f"block: column 'META' is not JSON: {error}") from error
    if not all(isinstance(meta, dict) for meta in metas):
        raise TrajectoryFormatError("block: column 'META' must hold JSON objects")
    return metas


def _digests(flat: Columns) -> list[bytes]:
    """Content digests of all records, as :meth:`Trajectory.digest` computes them."""
    prompts, tokens, commits, events = (
        memoryview(part.astype("<i4", copy=False).tobytes())
        for part in (flat.prompts, flat.tokens, flat.commit_step, flat.events)
    )
    head = struct.Struct("<5I")
    digests, p, g, e = [], 0, 0, 0
    lengths = zip(
        flat.num_prompt.tolist(),
        flat.num_generated.tolist(),
        flat.num_steps.tolist(),
        flat.num_events.tolist(),
        strict=True,
    )
    for P, G, T, K in lengths:
        body = (
            DIGEST_TAG,
            head.pack(P, G, T, flat.mask_id, K),
            prompts[p : p + 4 * P],
            tokens[g : g + 4 * G],
            commits[g : g + 4 * G],
            events[e : e + 12 * K],
        )
        digests.append(hashlib.sha256(b"".join(body)).digest()[:16])
        p, g, e = p + 4 * P, g + 4 * G, e + 12 * K
    return digests


def _read_given(column: Column | None, size: int) -> NDArray[np.bool_] | None:
    if column is None:
        return None
    if len(column.data) != (size + 7) // 8:
        raise TrajectoryFormatError(f"block: column 'GIVN' must have {(size + 7) // 8} bytes")
    bits = np.unpackbits(np.frombuffer(column.data, dtype=np.uint8), bitorder="little")
    if bits[size:].any():
        raise TrajectoryFormatError("block: column 'GIVN' has bits behind its end")
    return bits[:size].astype(bool)


def _read_events(read: ColumnReader, total: int) -> NDArray[np.int32]:
    return np.stack(
        [
            read.array("ESTP", total).astype(np.int32),
            read.array("EPOS", total).astype(np.int32),
            read.tokens("ETOK", total),
        ],
        axis=1,
    )


def _restore_unwritten(flat: Columns) -> None:
    """Puts -1 back where the column holds 0 for want of a write."""
    unwritten = (flat.commit_step == 0) & (flat.tokens == flat.mask_id)
    if flat.given is not None:
        if (flat.commit_step[flat.given] != 0).any():
            raise InvariantError("block: a given position has a commit step")
        unwritten |= flat.given
    flat.commit_step[unwritten] = -1


def _check_strictly(
    flat: Columns, statuses: NDArray[np.uint8], header: Header, digests: bytes
) -> None:
    flat.check()
    if len(set(flat.uids)) != len(flat.uids):
        raise InvariantError("block: a uid appears twice")
    if not all(flat.uids):
        raise InvariantError("block: a uid is empty")
    if bool((statuses >= 2).any()) != bool(header.flags & FLAG_PARTIAL):
        raise InvariantError("block: the flag for partial trajectories does not fit the statuses")
    actual = b"".join(_digests(flat))
    if actual != digests:
        at = next(
            i for i in range(len(flat.uids)) if actual[16 * i :][:16] != digests[16 * i :][:16]
        )
        raise ChecksumError(f"trajectory {flat.uids[at]!r}: content digest does not match")
