"""Format v1 of trajectories: records to bytes and back.

A block holds 1 to 65,535 records as columns (see :mod:`lit_dlm.trajectories.container` for the byte
layout and ``docs/trajectory_format.md`` for the whole format). Records are method-neutral: prompt,
final tokens, commit steps, superseded writes, seeds, and optional signal columns. Features of kept
steps live in a second member, see :mod:`lit_dlm.trajectories.feature_codec`.

One convention differs from the record in memory: the commit step column stores 0 where nothing was
ever written, since it is unsigned. Such a position holds the mask id and has no earlier write; a
given position is named by its own bit column. Both get back -1 on reading.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_dlm.trajectories.column_io import ColumnReader, make_column, pack_texts, unpack_texts
from lit_dlm.trajectories.columns import MAX_LENGTH, STATUSES, Columns, flatten
from lit_dlm.trajectories.container import MAX_RAW_BYTES, Column, Dtype, Header, pack, unpack
from lit_dlm.trajectories.errors import ChecksumError, InvariantError
from lit_dlm.trajectories.record import Trajectory, trusted
from lit_dlm.trajectories.record_fields import (
    content_digests,
    meta_bytes,
    read_metas,
    seeds,
    status_codes,
    uid_bytes,
)
from lit_dlm.trajectories.signal_codec import SIGNAL_TAGS, read_signals, signal_columns
from lit_dlm.trajectories.withheld import WithheldTrajectory, prompt_digest

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
_REQUIRED = ("SMID", "PLEN", "GLEN", "NSTP", "GTOK", "CSTP", "SEED", "CDIG", "STAT")
_EVENTS = ("ECNT", "ESTP", "EPOS", "ETOK")


def encode_block(
    records: Sequence[Trajectory],
    *,
    run_digest: bytes = b"\0" * 16,
    level: int = 9,
    withhold_prompts: bool = False,
    dictionary: bytes | None = None,
) -> bytes:
    """Writes records as one block. Features are not part of it.

    Args:
        records: 1 to 65,535 records with one mask id, vocabulary size and set of signals.
        run_digest: 16 bytes that name the run (see ``RunRecord.digest``).
        level: zstd level.
        withhold_prompts: store a digest of each prompt instead of its ids. Records that were read
            from such a block can only be written this way.
        dictionary: a trained zstd dictionary; it pays for blocks of few records, and every reader
            needs it.

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
    for name in ("mask_id", "vocab_size"):
        if not 0 <= getattr(flat, name) < 2**32:
            raise InvariantError(
                f"trajectory {records[0].uid!r}: {name} must be in 0..2**32-1, "
                f"got {getattr(flat, name)}"
            )
    flat.check()
    statuses = status_codes(records)
    uids = uid_bytes(records)
    cstp = np.maximum(flat.commit_step, 0)
    narrow = int(flat.num_steps.max()) <= 256
    num_prompt = np.array([record.num_prompt for record in records])
    columns = [
        Column("SMID", Dtype.BYTES, pack_texts("<H", uids)),
        make_column("PLEN", Dtype.U16, num_prompt),
        make_column("GLEN", Dtype.U16, flat.num_generated),
        make_column("NSTP", Dtype.U16, flat.num_steps),
        _prompt_column(records, flat, withhold_prompts),
        make_column("GTOK", Dtype.U24, flat.tokens),
        make_column("CSTP", Dtype.U8 if narrow else Dtype.U16, cstp),
        make_column("SEED", Dtype.U64, seeds(records)),
        Column("CDIG", Dtype.BYTES, b"".join(_digests(records, flat))),
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
    return pack(header, columns, level=level, dictionary=dictionary)


def decode_block(
    data: bytes | memoryview,
    *,
    strict: bool = True,
    max_raw_bytes: int = MAX_RAW_BYTES,
    dictionaries: Mapping[int, bytes] | None = None,
) -> list[Trajectory]:
    """Reads a block.

    The arrays of the records are views of the block's columns.

    Args:
        data: exactly one block.
        strict: also compute each record's content digest anew, and check the uids and the block
            flag. Checksums, lengths and the rules of the arrays are always checked.
        max_raw_bytes: refuse a block whose columns unpack to more than this.
        dictionaries: zstd dictionaries by id, for blocks that need one.

    Returns:
        The records in their stored order; :class:`WithheldTrajectory` where the block holds no
        prompt ids.

    Raises:
        TrajectoryFormatError: Or one of its kinds, whatever is wrong with the bytes.
    """
    header, columns = unpack(
        data, known=DTYPES, max_raw_bytes=max_raw_bytes, dictionaries=dictionaries
    )
    n = header.num_records
    if not 1 <= n <= MAX_LENGTH:
        raise InvariantError(f"block: expected 1 to {MAX_LENGTH} records, got {n}")
    missing = [tag for tag in _REQUIRED if tag not in columns]
    if "PTOK" not in columns and "PDIG" not in columns:
        missing.append("PTOK")
    present = [tag for tag in _EVENTS if tag in columns]
    if missing or len(present) not in (0, len(_EVENTS)):
        raise InvariantError(f"block: columns {missing or present} are missing or alone")
    read = ColumnReader(columns, DTYPES)
    num_prompt = read.integers("PLEN", n)
    has_prompts = "PTOK" in columns
    flat = _read_flat(read, header, num_prompt if has_prompts else np.zeros_like(num_prompt))
    _restore_unwritten(flat)
    flat.check()
    statuses = read.array("STAT", n)
    if statuses.max() >= len(STATUSES):
        raise InvariantError(f"block: unknown status code {statuses.max()}")
    seed_values = read.array("SEED", n)
    digests = read.raw("CDIG", 16 * n)
    prompt_digests = read.raw("PDIG", 16 * n) if "PDIG" in columns else None
    if strict:
        _check_strictly(flat, statuses, header)
        if has_prompts:
            _check_digests(flat, digests, prompt_digests)
    values = _split(flat, statuses, seed_values, read_metas(columns.get("META"), n))
    signals = read_signals(read, flat)
    records: list[Trajectory] = []
    if has_prompts:
        for fields, own in zip(values, signals, strict=True):
            fields["signals"] = own
            records.append(trusted(fields))
        return records
    assert prompt_digests is not None
    for i, (fields, own) in enumerate(zip(values, signals, strict=True)):
        part = slice(16 * i, 16 * i + 16)
        records.append(
            WithheldTrajectory(
                **{**fields, "signals": own},
                prompt_length=int(num_prompt[i]),
                prompt_digest=prompt_digests[part],
                content_digest=digests[part],
            )
        )
    return records


def _read_flat(read: ColumnReader, header: Header, num_prompt: NDArray[np.int64]) -> Columns:
    n = header.num_records
    num_generated = read.integers("GLEN", n)
    size = int(num_generated.sum())
    tokens = read.tokens("GTOK", size)
    has_events = "ECNT" in read.columns
    num_events = read.integers("ECNT", n) if has_events else np.zeros(n, dtype=np.int64)
    prompts = read.tokens("PTOK", int(num_prompt.sum())) if num_prompt.any() else _NO_IDS
    if not num_prompt.any() and "PTOK" in read.columns:
        read.raw("PTOK", 0)
    return Columns(
        uids=unpack_texts("<H", read.columns["SMID"], n),
        num_prompt=num_prompt,
        num_generated=num_generated,
        num_steps=read.integers("NSTP", n),
        prompts=prompts,
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
_NO_IDS = np.empty(0, dtype=np.int32)


def _prompt_column(records: Sequence[Trajectory], flat: Columns, withhold: bool) -> Column:
    if not withhold:
        for record in records:
            if isinstance(record, WithheldTrajectory):
                raise InvariantError(
                    f"trajectory {record.uid!r}: its prompt is withheld; give it back with "
                    "with_prompt, or withhold the prompts of the whole block",
                    record=record.uid,
                )
        return make_column("PTOK", Dtype.U24, flat.prompts)
    digests = [
        record.prompt_digest
        if isinstance(record, WithheldTrajectory)
        else prompt_digest(record.prompt_ids)
        for record in records
    ]
    return Column("PDIG", Dtype.BYTES, b"".join(digests))


def _digests(records: Sequence[Trajectory], flat: Columns) -> list[bytes]:
    if any(isinstance(record, WithheldTrajectory) for record in records):
        return [record.digest() for record in records]
    return content_digests(flat)


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


def _check_strictly(flat: Columns, statuses: NDArray[np.uint8], header: Header) -> None:
    if len(set(flat.uids)) != len(flat.uids):
        raise InvariantError("block: a uid appears twice")
    if not all(flat.uids):
        raise InvariantError("block: a uid is empty")
    if (statuses >= 2).any() and not header.flags & FLAG_PARTIAL:
        raise InvariantError("block: it holds partial trajectories without saying so in its flags")


def _check_digests(flat: Columns, digests: bytes, prompt_digests: bytes | None) -> None:
    actual = content_digests(flat)
    if b"".join(actual) != digests:
        at = next(i for i, own in enumerate(actual) if own != digests[16 * i : 16 * i + 16])
        raise ChecksumError(
            f"trajectory {flat.uids[at]!r}: content digest does not match", record=flat.uids[at]
        )
    if prompt_digests is not None:
        ends = np.cumsum(flat.num_prompt)[:-1]
        for i, ids in enumerate(np.split(flat.prompts, ends)):
            if prompt_digest(ids) != prompt_digests[16 * i : 16 * i + 16]:
                raise ChecksumError(
                    f"trajectory {flat.uids[i]!r}: prompt digest does not match",
                    record=flat.uids[i],
                )
