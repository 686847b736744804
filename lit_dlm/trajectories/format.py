"""Format 2 of trajectories: a block is one zstd frame around an Arrow IPC stream.

``pyarrow.ipc.open_stream(zstandard.decompress(block)).read_all()`` opens it: one row for each
record, columns as in :data:`COLUMNS`, and what all rows share in the metadata of the schema.
``docs/reference/trajectory_format.md`` has the rules. Features of kept steps are in a separate
member, packed in the same way: one row for each record of the block, in the same order, with
``uid`` and ``digest`` repeated. Which steps were kept is a column of the block.
"""

from __future__ import annotations

import json
import struct
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import zstandard
from numpy.typing import NDArray

from lit_dlm.trajectories.record import (
    MAX_LENGTH,
    SIGNAL_DTYPES,
    STATUSES,
    Columns,
    Trajectory,
    TrajectoryFormatError,
    checked,
    expect,
    flatten,
    trusted,
)

VERSION = "2"
NO_RUN = bytes(16)
"""Run digest of records whose run is not described."""
MAX_RAW_BYTES = 1 << 30
_RAW_SLACK, _RAW_RATIO = 64 << 20, 256
_OLD_MAGIC = b"\x89LDT"
_CUT_BYTES = 1024
"""Buffers of at least this size become separate zstd blocks."""
_END_BLOCK = zstandard.COMPRESSOBJ_FLUSH_BLOCK
_LOCAL = threading.local()

_IDS = pa.list_(pa.int32())
_WRITES = pa.list_(
    pa.struct([("step", pa.uint16()), ("position", pa.uint16()), ("token", pa.int32())])
)
COLUMNS: dict[str, tuple[pa.DataType, ...]] = {
    "uid": (pa.string(),),
    "prompt_ids": (_IDS,),
    "tokens": (_IDS,),
    "commit_step": (pa.list_(pa.uint8()), pa.list_(pa.uint16())),
    "num_steps": (pa.uint16(),),
    "seed": (pa.uint64(),),
    "status": (pa.string(),),
    "digest": (pa.binary(16),),
    "given": (pa.list_(pa.bool_()),),
    "superseded": (_WRITES,),
    "kept_steps": (pa.list_(pa.uint16()),),
    "meta": (pa.string(),),
    **{name: (pa.list_(pa.from_numpy_dtype(kind)),) for name, kind in SIGNAL_DTYPES.items()},
}
"""Columns of a record block and the types that each may have; see the fields of a record."""
_REQUIRED = tuple(COLUMNS)[:8]


@dataclass(frozen=True)
class FeatureMetadata:
    """What all features of a block share."""

    layout: str
    groups: tuple[int, ...]
    projector: str


@dataclass(frozen=True, eq=False)
class Block:
    """A record block as read; :func:`records_of` returns its records."""

    batch: pa.RecordBatch
    mask_id: int
    vocab_size: int
    run_digest: bytes
    features: FeatureMetadata | None  # None where no record of the block has features

    @property
    def kept_steps(self) -> list[NDArray[np.int32]]:
        """``n`` arrays ``(S,)``, empty for records without features."""
        if self.features is None:
            return [np.empty(0, dtype=np.int32)] * self.batch.num_rows
        return [part.astype(np.int32) for part in split_lists(self.batch.column("kept_steps"))]


def decode_block(data: bytes | memoryview, *, strict: bool = True) -> list[Trajectory]:
    """Reads a block without features; see :func:`records_of`."""
    return records_of(read_block(data), strict=strict)


def require(holds: object, rule: str) -> None:
    """Refuses bytes or records that break a rule of a block."""
    expect(holds, f"block: {rule}")


# -- records to columns ----------------------------------------------------------------------------


def record_batch(
    records: Sequence[Trajectory],
    *,
    run_digest: bytes = NO_RUN,
    metas: Sequence[str | None] | None = None,
    check: bool = True,
) -> pa.RecordBatch:
    """Returns the columns of a block.

    Args:
        records: with the same mask id, vocabulary size, signals and kind of features.
        run_digest: that of ``RunRecord.digest``.
        metas: :func:`meta_text` of each record, if the caller has it.
        check: check every rule of the format. Without it the records must have been checked
            (:func:`~lit_dlm.trajectories.record.checked`): that takes as long as all the rest.
    """
    require(1 <= len(records) <= MAX_LENGTH, f"1 to {MAX_LENGTH} records, got {len(records)}")
    flat = checked(records) if check else flatten(records)
    ((uid, count),) = Counter(flat.uids).most_common(1)
    require(count == 1, f"uid {uid!r} appears twice")
    metadata = {
        "lit_dlm_trajectories": VERSION,
        "mask_id": str(flat.mask_id),
        "vocab_size": str(flat.vocab_size),
        "run_digest": run_digest.hex(),
    }
    if (features := _feature_metadata(records)) is not None:
        metadata["features"] = json.dumps(asdict(features))
    columns = _required_columns(flat, records) | _optional_columns(records, metas)
    return pa.record_batch(columns).replace_schema_metadata(metadata)


def _required_columns(flat: Columns, records: Sequence[Trajectory]) -> dict[str, pa.Array]:
    # 255 is the last step of 256.
    steps = pa.uint8() if int(flat.num_steps.max()) <= 256 else pa.uint16()
    # Nulls are stored as 0 under a bitmap: a type with a sign would need a bit of every step.
    unwritten = flat.commit_step < 0
    commit = pa.array(
        np.maximum(flat.commit_step, 0), steps, mask=unwritten if unwritten.any() else None
    )
    return {
        "uid": pa.array(flat.uids),
        "prompt_ids": _lists(pa.array(flat.prompts), flat.num_prompt),
        "tokens": _lists(pa.array(flat.tokens), flat.num_generated),
        "commit_step": _lists(commit, flat.num_generated),
        "num_steps": pa.array(flat.num_steps, pa.uint16()),
        "seed": pa.array([record.seed for record in records], pa.uint64()),
        "status": pa.array([record.status for record in records]),
        "digest": pa.array(flat.content_digests(), pa.binary(16)),
    }


def _optional_columns(
    records: Sequence[Trajectory], metas: Sequence[str | None] | None
) -> dict[str, pa.Array]:
    """Columns that at least one record needs; null for the others."""
    lists: dict[str, list[NDArray[Any] | None]] = {
        "given": [record.given for record in records],
        "superseded": [record.superseded for record in records],
        "kept_steps": [None if r.features is None else r.features.kept_steps for r in records],
    }
    columns: dict[str, pa.Array] = {
        name: list_column(parts, COLUMNS[name][0])
        for name, parts in lists.items()
        if any(part is not None for part in parts)
    }
    if any(record.meta for record in records):
        columns["meta"] = pa.array(metas or [meta_text(record) for record in records])
    signals = sorted(records[0].signals)
    other = [record.uid for record in records if sorted(record.signals) != signals]
    require(not other, f"all records need the same signals {signals}, unlike {other[:1]}")
    for name in signals:
        columns[name] = list_column([record.signals[name] for record in records], COLUMNS[name][0])
    return columns


def _lists(values: pa.Array, lengths: Sequence[int] | NDArray[Any], mask: Any = None) -> Any:
    offsets = pa.array(list(accumulate(map(int, lengths), initial=0)), pa.int32())
    return pa.ListArray.from_arrays(offsets, values, mask=mask)


def list_column(
    parts: Sequence[NDArray[Any] | None], kind: pa.DataType | None = None
) -> pa.ListArray:
    """Returns a column of arrays, null for ``None``; a struct's arrays are ``(K, fields)``."""
    present = [part for part in parts if part is not None]
    joined = np.concatenate(present)
    if kind is None:
        values = pa.array(joined)
    elif pa.types.is_struct(kind.value_type):
        fields = list(kind.value_type)
        parts_of = [pa.array(joined[:, at], field.type) for at, field in enumerate(fields)]
        values = pa.StructArray.from_arrays(parts_of, fields=fields)
    else:
        values = pa.array(joined, kind.value_type)
    mask = pa.array([part is None for part in parts]) if len(present) < len(parts) else None
    return _lists(values, [0 if part is None else len(part) for part in parts], mask)


def _feature_metadata(records: Sequence[Trajectory]) -> FeatureMetadata | None:
    """What the features of records share; ``None`` where no record has any."""
    present = [(record.uid, record.features) for record in records if record.features is not None]
    if not present:
        return None
    first = present[0][1]
    for uid, own in present:
        rule = f"all features need one kind, unlike {own.kind} of {uid!r}"
        require(own.kind == first.kind, rule)
    return FeatureMetadata(first.layout, first.groups, first.projector_digest)


def meta_text(record: Trajectory) -> str | None:
    """The meta of a record as JSON with sorted keys; ``None`` for an empty one."""
    if not record.meta:
        return None
    try:
        text = canonical_json(record.meta)
        text.encode()  # refuses a lone surrogate
    except (TypeError, ValueError) as error:
        raise TrajectoryFormatError(
            f"trajectory {record.uid!r}: meta is not JSON: {error}"
        ) from error
    return text


def canonical_json(value: Any) -> str:
    """The canonical text of a JSON value: sorted keys, no white space, UTF-8."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


# -- columns to records ----------------------------------------------------------------------------


def read_block(data: bytes | memoryview) -> Block:
    """Reads a block and checks its bytes, types and metadata, but not yet its records."""
    return block_of(unpack(data))


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turns the libraries' errors about malformed bytes into a ``TrajectoryFormatError``."""
    try:
        yield
    except TrajectoryFormatError:  # says more than what follows
        raise
    except (
        *(zstandard.ZstdError, pa.ArrowException, OSError, struct.error, RecursionError),
        *(ValueError, TypeError, KeyError, IndexError, AttributeError, StopIteration, EOFError),
    ) as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise TrajectoryFormatError(f"block: {what}: {text}") from error


def block_of(batch: pa.RecordBatch) -> Block:
    """Checks the types and metadata of columns, whoever wrote them, and returns the block."""
    batch = known_columns(batch, COLUMNS, _REQUIRED)
    with refusing("its metadata do not fit"):
        texts = {key.decode(): value.decode() for key, value in batch.schema.metadata.items()}
        features = None
        if "kept_steps" in batch.schema.names:
            own = json.loads(texts["features"])
            groups = tuple(map(int, own["groups"]))
            features = FeatureMetadata(str(own["layout"]), groups, str(own["projector"]))
        run_digest = bytes.fromhex(texts["run_digest"])
        ids = int(texts["mask_id"]), int(texts["vocab_size"])
    sizes = batch.num_rows, len(run_digest)
    rule = f"expected 1 to {MAX_LENGTH} records of a run digest of 16 bytes, got {sizes}"
    require(1 <= sizes[0] <= MAX_LENGTH and sizes[1] == 16, rule)
    return Block(batch, *ids, run_digest, features)


def known_columns(
    batch: pa.RecordBatch, columns: dict[str, tuple[pa.DataType, ...]], required: Collection[str]
) -> pa.RecordBatch:
    """Returns the known columns, after checking their types, lengths and texts."""
    # Arrow's accessors read beyond a buffer if offsets or lengths lie, so all of it is validated
    # before the first of them is called.
    with refusing("its columns do not fit"):
        names = batch.schema.names
        missing = [name for name in required if name not in names]
        once = not missing and len(set(names)) == len(names)
        require(once, f"columns {missing or names} missing or repeated")
        known = batch.select([name for name in names if name in columns])
        for field in known.schema:
            kinds = columns[field.name]
            rule = f"column {field.name!r} must be {kinds[-1]}, got {field.type}"
            require(field.type in kinds, rule)
        known.validate(full=True)
    return known


def records_of(block: Block, *, strict: bool = True) -> list[Trajectory]:
    """Returns the records of a block, whose arrays are views of one array per column.

    The rules for the arrays are always checked; ``strict`` also recomputes each record's content
    digest and checks that uids are unique.
    """
    batch = block.batch
    flat = _read_flat(block)
    flat.check()  # before views are made: lengths decide where they begin
    statuses = _column(batch, "status").to_pylist()
    unknown = set(statuses).difference(STATUSES)
    require(not unknown, f"unknown status {sorted(unknown)[:1]}")
    if strict:
        digests = _column(batch, "digest")
        first = 16 * digests.offset
        _check_strictly(flat, digests.buffers()[1][first : first + 16 * len(digests)].to_pybytes())
    n = len(statuses)
    given: list[Any] = [None] * n
    events: list[Any] = [None] * n
    if flat.given is not None:
        given = [own if own.any() else None for own in views(flat.given, flat.num_generated)]
    if len(flat.events):
        events = [own if len(own) else None for own in views(flat.events, flat.num_events)]
    lists = zip(
        flat.uids,
        views(flat.prompts, flat.num_prompt),
        views(flat.tokens, flat.num_generated),
        views(flat.commit_step, flat.num_generated),
        flat.num_steps.tolist(),
        _column(batch, "seed").to_numpy().tolist(),
        statuses,
        given,
        events,
        _read_signals(batch, flat),
        _read_metas(batch),
        strict=True,
    )
    return [
        trusted(  # spelt out: a loop over the names would take a tenth of a block's time
            {
                "uid": uid,
                "prompt_ids": prompt,
                "tokens": tokens,
                "commit_step": commit,
                "num_steps": T,
                "mask_id": flat.mask_id,
                "vocab_size": flat.vocab_size,
                "seed": seed,
                "status": status,
                "given": own,
                "superseded": writes,
                "signals": signals,
                "features": None,
                "meta": meta,
            }
        )
        for uid, prompt, tokens, commit, T, seed, status, own, writes, signals, meta in lists
    ]


def _column(batch: pa.RecordBatch, name: str) -> pa.Array:
    column = batch.column(name)
    require(not column.null_count, f"column {name!r} holds nulls")
    return column


def _flat(column: pa.Array) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Concatenated values of all lists, and ``(n,)`` lengths; a null is an empty list."""
    values, lengths = _bare(column)
    parts = values.flatten() if pa.types.is_struct(values.type) else [values]
    has_nulls = values.null_count or any(part.null_count for part in parts)
    require(not has_nulls, "nulls in a list")
    arrays = [part.to_numpy(zero_copy_only=False) for part in parts]
    return (arrays[0] if len(arrays) == 1 else np.stack(arrays, axis=1)), lengths


def _bare(column: pa.Array) -> tuple[pa.Array, NDArray[np.int64]]:
    # Without Arrow's functions: calling one takes longer than processing a block of numbers.
    offsets = column.offsets.to_numpy()
    lengths = np.diff(offsets).astype(np.int64)
    if column.null_count:
        is_null = column.is_null().to_numpy(zero_copy_only=False)
        require(not lengths[is_null].any(), "a null is no empty list")
    return column.values[int(offsets[0]) : int(offsets[-1])], lengths


def views(values: NDArray[Any], lengths: NDArray[np.int64]) -> list[NDArray[Any]]:
    """Splits an array into consecutive parts of the given lengths, as views."""
    return [values[first:end] for first, end in pairwise(accumulate(lengths.tolist(), initial=0))]


def split_lists(column: pa.Array) -> list[NDArray[Any]]:
    """Returns the lists of a column as views of one array."""
    return views(*_flat(column))


def _read_flat(block: Block) -> Columns:
    batch, names = block.batch, block.batch.schema.names
    prompts, num_prompt = _flat(_column(batch, "prompt_ids"))
    tokens, num_generated = _flat(_column(batch, "tokens"))
    values, lengths = _bare(_column(batch, "commit_step"))
    fits = np.array_equal(lengths, num_generated)
    if values.null_count:  # to_numpy would make floats of them, with NaN
        commit_step = values.fill_null(0).to_numpy().astype(np.int32)
        commit_step[values.is_null().to_numpy(zero_copy_only=False)] = -1
    else:
        commit_step = values.to_numpy().astype(np.int32)
    given = None
    if "given" in names:
        stored, lengths = _flat(batch.column("given"))
        has = batch.column("given").is_valid().to_numpy(zero_copy_only=False)
        fits = fits and np.array_equal(lengths, np.where(has, num_generated, 0))
        given = np.zeros(len(tokens), dtype=bool)
        if fits:
            given[np.repeat(has, num_generated)] = stored
    require(fits, "commit_step and given must be as long as tokens")
    num_events, events = np.zeros(len(num_prompt), dtype=np.int64), np.empty((0, 3), np.int32)
    if "superseded" in names:
        events, num_events = _flat(batch.column("superseded"))
    return Columns(
        uids=_column(batch, "uid").to_pylist(),
        num_prompt=num_prompt,
        num_generated=num_generated,
        num_steps=_column(batch, "num_steps").to_numpy().astype(np.int64),
        # Copies: Arrow's arrays are read-only, which torch warns about.
        prompts=prompts.copy(),
        tokens=tokens.copy(),
        commit_step=commit_step,
        given=given,
        num_events=num_events,
        events=events.astype(np.int32, copy=False),
        mask_id=block.mask_id,
        vocab_size=block.vocab_size,
    )


def _check_strictly(flat: Columns, digests: bytes) -> None:
    """Checks uids and content digests, which takes longer than reading them."""
    is_right = len(set(flat.uids)) == len(flat.uids) and all(flat.uids)
    require(is_right, "a uid is empty or appears twice")
    # Joined: one comparison of bytes for the whole block, and a search only if it fails.
    own = flat.content_digests()
    if b"".join(own) != digests:
        at = next(i for i, one in enumerate(own) if one != digests[16 * i : 16 * i + 16])
        require(False, f"trajectory {flat.uids[at]!r}: content digest does not match")


def _read_metas(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    if "meta" not in batch.schema.names:
        return [{} for _ in range(batch.num_rows)]
    with refusing("column 'meta' is not JSON"):
        return [dict(json.loads(text or "{}")) for text in batch.column("meta").to_pylist()]


def _read_signals(batch: pa.RecordBatch, flat: Columns) -> list[dict[str, NDArray[Any]]]:
    signals: list[dict[str, NDArray[Any]]] = [{} for _ in flat.uids]
    names = [name for name in SIGNAL_DTYPES if name in batch.schema.names]
    # How many values a step_* signal must have follows from the record, so no length is stored.
    rows = flat.masked_row_counts() if names else flat.num_steps
    for name in names:
        values, lengths = _flat(_column(batch, name))
        wanted = flat.num_generated if name.startswith("commit_") else rows
        require(np.array_equal(lengths, wanted), f"column {name!r} has lists of other lengths")
        for own, part in zip(signals, views(values, lengths), strict=True):
            own[name] = part
    return signals


# -- columns to bytes ------------------------------------------------------------------------------


class _Buffers:
    """A file that keeps Arrow's writes separate: metadata, and each buffer of each column."""

    closed = False

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def write(self, data: Any) -> int:
        self.parts.append(bytes(data))
        return len(self.parts[-1])

    def flush(self) -> None: ...

    def close(self) -> None: ...


def pack(batch: pa.RecordBatch, *, level: int) -> bytes:
    """One zstd frame, with its checksum and content size, around an Arrow IPC stream."""
    sink = _Buffers()
    with pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), batch.schema) as writer:
        writer.write_batch(batch)
    # Known beforehand, so that the frame can say it: readers refuse to unpack without.
    size = sum(map(len, sink.parts))
    frame = zstandard.ZstdCompressor(
        level=level, write_checksum=True, write_content_size=True
    ).compressobj(size=size)
    packed = []
    for part in sink.parts:
        # Tokens, steps and floats have different statistics, and a zstd block has one set of them:
        # a block for each buffer saves 8 %.
        is_large = len(part) >= _CUT_BYTES
        packed += [frame.flush(_END_BLOCK)] if is_large else []
        packed.append(frame.compress(part))
        packed += [frame.flush(_END_BLOCK)] if is_large else []
    packed.append(frame.flush())
    data = b"".join(packed)
    fits = size <= raw_limit(len(data))
    require(fits, f"readers would refuse {size} bytes in {len(data)}; put fewer into a block")
    return data


def raw_limit(stored: int) -> int:
    """Most bytes that ``stored`` ones may unpack to, so that a small file cannot fill memory."""
    return min(MAX_RAW_BYTES, _RAW_SLACK + _RAW_RATIO * stored)


def unpack(data: bytes | memoryview) -> pa.RecordBatch:
    """Returns the columns of one packed batch, whoever wrote it.

    Any flipped bit is an error, except for a few bits of a frame that zstd itself does not read.
    """
    is_old = bytes(data[:4]) == _OLD_MAGIC
    require(not is_old, "of the older format 1, which this version does not read")
    with refusing("does not unpack"):
        frame = zstandard.get_frame_parameters(data)
        limit = raw_limit(len(data))
        # An unknown size is reported as the largest number; nothing is unpacked before this check.
        fits = frame.has_checksum and frame.content_size <= limit
        size = f"at most {limit} bytes, got {frame.content_size}"
        require(fits, f"expected a frame with a checksum and {size}")
        if not hasattr(_LOCAL, "decompressor"):  # creating one takes a third of a block's time
            _LOCAL.decompressor = zstandard.ZstdDecompressor()
        raw = _LOCAL.decompressor.decompress(data, allow_extra_data=False)
        messages = pa.ipc.MessageReader.open_stream(pa.py_buffer(raw))
        first, second = messages.read_next_message(), messages.read_next_message()
        is_plain = second.type == "record batch" and not _has_packed_buffers(
            second.metadata.to_pybytes()
        )
        require(is_plain, "expected one record batch, not compressed within")
        schema = pa.ipc.read_schema(first)
        version = (schema.metadata or {}).get(b"lit_dlm_trajectories", b"none").decode()
        require(version == VERSION, f"format version {version}, this reader knows {VERSION}")
        return pa.ipc.read_record_batch(second, schema)


def _has_packed_buffers(message: bytes) -> bool:
    """Whether the buffers of a record batch are themselves compressed.

    Arrow would allocate whatever size such a buffer claims, and has no option to refuse them.
    Field 3 of the flatbuffer ``RecordBatch`` (its ``compression``), which is field 2 of ``Message``
    (its ``header``), says if they are. Reading two tables of a flatbuffer takes 6 microseconds.
    """

    def field(table: int, number: int) -> int:
        """Where a field of a table is; 0 if the table leaves it out, as writers do by default."""
        fields = table - struct.unpack_from("<i", message, table)[0]
        (size,) = struct.unpack_from("<H", message, fields)
        at = 4 + 2 * number
        (offset,) = struct.unpack_from("<H", message, fields + at) if at < size else (0,)
        return table + offset if offset else 0

    (root,) = struct.unpack_from("<I", message, 0)
    header = field(root, 2)
    return field(header + struct.unpack_from("<I", message, header)[0], 3) != 0
