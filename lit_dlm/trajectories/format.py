"""Format v1 of trajectories: records to bytes and back.

A block holds 1 to 65,535 records as columns (see :mod:`lit_dlm.trajectories.container` for the byte
layout and ``docs/trajectory_format.md`` for the whole format). Records are method-neutral: prompt,
final tokens, commit steps, superseded writes, seeds, and optional signal columns. Features of kept
steps live in a second member, see :mod:`lit_dlm.trajectories.features`.

One convention differs from the record in memory: the commit step column stores 0 where nothing was
ever written, since it is unsigned. Such a position holds the mask id and has no earlier write; a
given position is named by its own bit column. Both get back -1 on reading.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

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
    split_texts,
    unpack,
    unpack_texts,
)
from lit_dlm.trajectories.errors import (
    ChecksumError,
    InvariantError,
    TrajectoryFormatError,
    UnsupportedFormatError,
)
from lit_dlm.trajectories.record import (
    MAX_LENGTH,
    SIGNAL_DTYPES,
    STATUSES,
    TOP_SIGNALS,
    Columns,
    Trajectory,
    checked,
    trusted,
)

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
    "step_top_ids": ("RTKI", Dtype.U24),
    "step_top_log_probs": ("RTKL", Dtype.F16),
}
"""Signal name to column."""
FLAG_PARTIAL = 0x0001
"""Block flag: some record was cut by a step limit or aborted."""
FLAG_FEATURES = 0x10000
"""Block flag, of the half that readers may ignore: a features member belongs to this block."""

DTYPES: dict[str, tuple[Dtype, ...]] = {
    "SMID": (Dtype.BYTES,),
    "PLEN": (Dtype.U16,),
    "GLEN": (Dtype.U16,),
    "NSTP": (Dtype.U16,),
    "PTOK": (Dtype.U24,),
    "PDIG": (Dtype.BYTES,),
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
"""Columns that this reader knows, with the element types that each may have."""
_REQUIRED = ("SMID", "PLEN", "GLEN", "NSTP", "PTOK", "GTOK", "CSTP", "SEED", "CDIG", "STAT")
_EVENTS = ("ECNT", "ESTP", "EPOS", "ETOK")


def encode_block(
    records: Sequence[Trajectory],
    *,
    run_digest: bytes = b"\0" * 16,
    level: int = 9,
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
    flat = checked(records)
    if len(set(flat.uids)) < len(records):
        twice = next(uid for uid in flat.uids if flat.uids.count(uid) > 1)
        raise InvariantError(f"trajectory {twice!r}: a uid appears twice", record=twice)
    statuses = np.array([STATUSES.index(record.status) for record in records])
    # -1 goes in as 0: a mask or a given token tells the reader that no step wrote the cell.
    cstp = np.maximum(flat.commit_step, 0)
    narrow = int(flat.num_steps.max()) <= 256
    columns = [
        Column("SMID", Dtype.BYTES, pack_texts("<H", [uid.encode() for uid in flat.uids])),
        make_column("PLEN", Dtype.U16, flat.num_prompt),
        make_column("GLEN", Dtype.U16, flat.num_generated),
        make_column("NSTP", Dtype.U16, flat.num_steps),
        make_column("PTOK", Dtype.U24, flat.prompts),
        make_column("GTOK", Dtype.U24, flat.tokens),
        make_column("CSTP", Dtype.U8 if narrow else Dtype.U16, cstp),
        make_column("SEED", Dtype.U64, np.array([r.seed for r in records], dtype=np.uint64)),
        Column("CDIG", Dtype.BYTES, b"".join(flat.content_digests())),
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
            Column("META", Dtype.BYTES, pack_texts("<I", [meta_bytes(r) for r in records]))
        )
    columns += signal_columns(records)
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
    data: bytes | memoryview,
    *,
    strict: bool = True,
) -> list[Trajectory]:
    """Reads a block.

    The arrays of the records are views of the block's columns.

    Args:
        data: exactly one block.
        strict: also compute each record's content digest anew, and check the uids and the block
            flag. Checksums, lengths and the rules of the arrays are always checked.

    Returns:
        The records in their stored order.

    Raises:
        TrajectoryFormatError: Or one of its kinds, whatever is wrong with the bytes.
    """
    header, columns = unpack(data, known=DTYPES)
    n = header.num_records
    if not 1 <= n <= MAX_LENGTH:
        raise InvariantError(f"block: expected 1 to {MAX_LENGTH} records, got {n}")
    missing = [tag for tag in _REQUIRED if tag not in columns]
    present = [tag for tag in _EVENTS if tag in columns]
    if missing == ["PTOK"] and "PDIG" in columns:
        raise UnsupportedFormatError(
            "block: its prompts are withheld (digests in place of ids); only version 0.1 of "
            "lit-dlm could read such a block"
        )
    if missing or len(present) not in (0, len(_EVENTS)):
        raise InvariantError(f"block: columns {missing or present} are missing or alone")
    read = ColumnReader(columns, DTYPES)
    flat = _read_flat(read, header)
    _restore_unwritten(flat)
    flat.check()
    statuses = read.array("STAT", n)
    if statuses.max() >= len(STATUSES):
        raise InvariantError(f"block: unknown status code {statuses.max()}")
    seed_values = read.array("SEED", n)
    digests = read.raw("CDIG", 16 * n)
    if strict:
        _check_strictly(flat, statuses, header, digests)
    fields = _split(flat, statuses, seed_values, read_metas(columns.get("META"), n))
    signals = read_signals(read, flat)
    return [trusted({**own, "signals": s}) for own, s in zip(fields, signals, strict=True)]


def _read_flat(read: ColumnReader, header: Header) -> Columns:
    n = header.num_records
    num_prompt, num_generated = read.integers("PLEN", n), read.integers("GLEN", n)
    size = int(num_generated.sum())
    tokens = read.tokens("GTOK", size)
    has_events = "ECNT" in read.columns
    num_events = read.integers("ECNT", n) if has_events else np.zeros(n, dtype=np.int64)
    return Columns(
        uids=unpack_texts("<H", read.columns["SMID"], n),
        num_prompt=num_prompt,
        num_generated=num_generated,
        num_steps=read.integers("NSTP", n),
        prompts=read.tokens("PTOK", int(num_prompt.sum())),
        tokens=tokens,
        commit_step=read.array("CSTP", size).astype(np.int32),
        given=read_given(read.columns.get("GIVN"), size),
        num_events=num_events,
        events=_read_events(read, int(num_events.sum())) if has_events else _NO_EVENTS,
        mask_id=header.mask_id,
        vocab_size=header.vocab_size,
    )


def _split(
    flat: Columns,
    statuses: NDArray[np.uint8],
    seed_values: NDArray[np.uint64],
    metas: list[dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """Fields of one record after the other, without its signals; arrays are views."""
    mask_id, vocab_size = flat.mask_id, flat.vocab_size
    prompts, tokens, commit_step, events = flat.prompts, flat.tokens, flat.commit_step, flat.events
    rows = zip(
        flat.uids,
        np.cumsum(flat.num_prompt).tolist(),
        np.cumsum(flat.num_generated).tolist(),
        np.cumsum(flat.num_events).tolist(),
        flat.num_steps.tolist(),
        seed_values.tolist(),
        statuses.tolist(),
        metas,
        strict=True,
    )
    start = prompt_start = event_start = 0
    for uid, prompt_end, end, event_end, num_steps, seed, code, meta in rows:
        given = None if flat.given is None else flat.given[start:end]
        yield {
            "uid": uid,
            "prompt_ids": prompts[prompt_start:prompt_end],
            "tokens": tokens[start:end],
            "commit_step": commit_step[start:end],
            "num_steps": num_steps,
            "mask_id": mask_id,
            "vocab_size": vocab_size,
            "seed": seed,
            "status": STATUSES[code],
            "given": given if given is not None and given.any() else None,
            "superseded": events[event_start:event_end] if event_end > event_start else None,
            "features": None,
            "meta": meta,
        }
        start, prompt_start, event_start = end, prompt_end, event_end


_NO_EVENTS = np.empty((0, 3), dtype=np.int32)


def read_given(column: Column | None, size: int) -> NDArray[np.bool_] | None:
    """``(size,)`` bool of the column ``GIVN``; ``None`` where no position is given."""
    if column is None:
        return None
    if len(column.data) != (size + 7) // 8:
        raise InvariantError(f"block: column 'GIVN' must have {(size + 7) // 8} bytes")
    bits = np.unpackbits(np.frombuffer(column.data, dtype=np.uint8), bitorder="little")
    if bits[size:].any():
        raise InvariantError("block: column 'GIVN' has bits behind its end")
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
    """What costs more to check than to read: uids, the block flag and the content digests."""
    if len(set(flat.uids)) != len(flat.uids):
        raise InvariantError("block: a uid appears twice")
    if not all(flat.uids):
        raise InvariantError("block: a uid is empty")
    if (statuses >= 2).any() and not header.flags & FLAG_PARTIAL:
        raise InvariantError("block: it holds partial trajectories without saying so in its flags")
    actual = flat.content_digests()
    if b"".join(actual) != digests:
        at = next(i for i, own in enumerate(actual) if own != digests[16 * i : 16 * i + 16])
        raise ChecksumError(
            f"trajectory {flat.uids[at]!r}: content digest does not match", record=flat.uids[at]
        )


# -- meta ----------------------------------------------------------------------------------------


def meta_bytes(record: Trajectory) -> bytes:
    """The meta of a record as JSON with sorted keys; nothing for an empty one."""
    if not record.meta:
        return b""
    try:
        return json.dumps(
            record.meta, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        ).encode()
    except (TypeError, ValueError) as error:
        raise InvariantError(
            f"trajectory {record.uid!r}: meta is not JSON: {error}", record=record.uid
        ) from error


def read_metas(column: Column | None, n: int) -> list[dict[str, Any]]:
    """The inverse of :func:`meta_bytes` for the column ``META``; empty ones without it."""
    if column is None:
        return [{} for _ in range(n)]
    texts = split_texts("<I", column, n)
    try:
        metas = [json.loads(text) if text else {} for text in texts]
    except (ValueError, RecursionError) as error:
        raise TrajectoryFormatError(f"block: column 'META' is not JSON: {error}") from error
    if not all(isinstance(meta, dict) for meta in metas):
        raise TrajectoryFormatError("block: column 'META' must hold JSON objects")
    return metas


# -- signals -------------------------------------------------------------------------------------


def signal_columns(records: Sequence[Trajectory]) -> list[Column]:
    """The signal columns of a block; all records must carry the same signals."""
    names = [(name, values.shape[1:]) for name, values in sorted(records[0].signals.items())]
    for record in records:
        own = [(name, values.shape[1:]) for name, values in sorted(record.signals.items())]
        if own != names:
            raise InvariantError(
                f"trajectory {record.uid!r}: all records of a block need the same signals, "
                f"expected {names}, got {own}"
            )
    columns = []
    for name, _ in names:
        tag, dtype = SIGNAL_TAGS[name]
        for record in records:
            _check_range(record.uid, name, record.signals[name], dtype)
        values = np.concatenate([record.signals[name] for record in records])
        columns.append(make_column(tag, dtype, values.reshape(-1)))
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
    rows = flat.masked_row_counts() if names else None
    for name in names:
        tag, dtype = SIGNAL_TAGS[name]
        if name.startswith("commit_"):
            lengths = flat.num_generated
        elif name == "step_time_us":
            lengths = flat.num_steps
        else:
            assert rows is not None
            lengths = rows
        total = int(lengths.sum())
        width = 1
        if name in TOP_SIGNALS:
            width = len(read.columns[tag].data) // max(total * (3 if dtype is Dtype.U24 else 2), 1)
        count = total * width
        values = read.tokens(tag, count) if dtype is Dtype.U24 else read.array(tag, count)
        values = values.astype(SIGNAL_DTYPES[name], copy=False)
        if name in TOP_SIGNALS:
            values = values.reshape(total, width)
        ends = np.cumsum(lengths).tolist()
        for i, length in enumerate(lengths.tolist()):
            signals[i][name] = values[ends[i] - length : ends[i]]
    return signals
