"""The byte layout of a block: header, column directory, payloads, trailer.

This module knows nothing about trajectories. It stores named columns of bytes, each raw or
zstd-compressed, so that every bit of the block is covered by a checksum, nothing is executed on
reading, and a damaged or hostile header cannot make the reader allocate more than a multiple of
the block.

===============  ==================================================================================
header, 48 B     magic, u8 major, u8 minor, u16 columns, u32 records, u32 flags, u32 mask id,
                 u32 vocabulary size, u32 dictionary id, 16 B run digest
directory, 28 B  per column: 4 B tag, u8 dtype, u8 codec, u16 flags, u64 raw length, u64 stored
                 length, u32 CRC32 of the stored bytes
u32              CRC32 of header and directory
payloads         back to back in directory order
trailer, 16 B    u64 block length, u32 the header CRC again, ``LDTE``
===============  ==================================================================================

All numbers are little-endian.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

from lit_dlm.trajectories.errors import (
    BadMagicError,
    ChecksumError,
    InvariantError,
    TrajectoryFormatError,
    TruncatedBlockError,
    UnsupportedFormatError,
)

MAGIC = b"\x89LDT\r\n\x1a\n"
END = b"LDTE"
MAJOR, MINOR = 1, 0
UNDERSTOOD_FLAGS = 0x0001
"""Block flags of the low half that this reader knows: bit 0, partial trajectories."""
MUST_UNDERSTAND = 0x0001
"""Column flag: a reader that does not know the tag must refuse the block."""
MAX_RAW_BYTES = 1 << 30
"""Cap on the unpacked columns of one block, together and hence each."""
_RAW_SLACK, _RAW_RATIO = 32 << 20, 256

_HEADER = struct.Struct("<8sBBHIIIII16s")
_ENTRY = struct.Struct("<4sBBHQQI")
_TRAILER = struct.Struct("<QI4s")
_HEAD_READ = 2048
"""Bytes read at once from a file: header and directory of up to 71 columns."""
_LOCAL = threading.local()


class Dtype(IntEnum):
    """Element types of columns."""

    U8 = 1
    U16 = 2
    U24 = 3
    U32 = 4
    U64 = 5
    F16 = 6
    F32 = 7
    I8 = 8
    BYTES = 9
    BF16 = 10


class Codec(IntEnum):
    """How a column is stored."""

    RAW = 0
    ZSTD = 1
    ZSTD_DICTIONARY = 2


@dataclass(frozen=True, kw_only=True)
class Header:
    """Facts about a block as a whole."""

    num_records: int
    flags: int
    mask_id: int
    vocab_size: int
    run_digest: bytes


@dataclass(frozen=True)
class Column:
    """One named array as bytes."""

    tag: str
    dtype: Dtype
    data: bytes
    flags: int = 0


class _Entry(NamedTuple):
    """One line of the directory, with the place of its payload."""

    tag: str
    dtype: int
    codec: int
    flags: int
    raw_length: int
    stored_length: int
    crc: int
    at: int
    """First byte of the payload, from the start of the block."""


@dataclass(frozen=True)
class _Head:
    """Header and directory, checked."""

    header: Header
    entries: list[_Entry]
    crc: int
    length: int
    """Bytes of the whole block, as the directory adds them up."""


def raw_limit(stored: int) -> int:
    """Most bytes that a block of so many may unpack to: a small file cannot take much memory."""
    return min(MAX_RAW_BYTES, _RAW_SLACK + _RAW_RATIO * stored)


def pack(header: Header, columns: Sequence[Column], *, level: int) -> bytes:
    """Writes a block.

    Args:
        header: facts about the block.
        columns: in the order in which they are stored.
        level: zstd level; a column that does not shrink, or would shrink so much that readers
            took it for a bomb, is stored raw.

    Returns:
        The bytes of the block.

    Raises:
        InvariantError: If a number does not fit its field, or the columns are too large.
    """
    compressor = _compressor(level)
    for name in ("num_records", "flags", "mask_id", "vocab_size"):
        if not 0 <= getattr(header, name) < 2**32:
            raise InvariantError(
                f"block: {name} must be in 0..2**32-1, got {getattr(header, name)}"
            )
    raw_total = sum(len(column.data) for column in columns)
    if raw_total > MAX_RAW_BYTES:
        raise InvariantError(
            f"block: {header.num_records} records take {raw_total} bytes, more than "
            f"{MAX_RAW_BYTES}; put fewer into a block"
        )
    packed = [_packed(compressor, column.data) for column in columns]
    while raw_total > raw_limit(sum(map(len, packed))):
        least = max(range(len(columns)), key=lambda at: len(columns[at].data) - len(packed[at]))
        packed[least] = columns[least].data
    directory, payloads = [], []
    for column, stored in zip(columns, packed, strict=True):
        codec = Codec.RAW if len(stored) == len(column.data) else Codec.ZSTD
        entry = (len(column.data), len(stored), zlib.crc32(stored))
        tag = column.tag.encode("ascii")
        directory.append(_ENTRY.pack(tag, column.dtype, codec, column.flags, *entry))
        payloads.append(stored)
    head = _HEADER.pack(
        MAGIC,
        MAJOR,
        MINOR,
        len(columns),
        header.num_records,
        header.flags,
        header.mask_id,
        header.vocab_size,
        0,  # no zstd dictionary
        header.run_digest,
    ) + b"".join(directory)
    crc = zlib.crc32(head)
    length = len(head) + 4 + sum(map(len, payloads)) + _TRAILER.size
    return b"".join([head, crc.to_bytes(4, "little"), *payloads, _TRAILER.pack(length, crc, END)])


def _packed(compressor: zstandard.ZstdCompressor, data: bytes) -> bytes:
    """Compressed, where that makes it smaller."""
    packed = compressor.compress(data) if len(data) > 16 else data
    return packed if len(packed) < len(data) else data


def stored_sizes(data: bytes | memoryview) -> dict[str, tuple[int, int]]:
    """Bytes of every column of a block, also of unknown ones: raw, and as stored.

    Raises:
        TrajectoryFormatError: Or one of its kinds, if header or directory are not in order.
    """
    head = _read_head(memoryview(data), len(data))
    return {entry.tag: (entry.raw_length, entry.stored_length) for entry in head.entries}


def read_header(data: bytes | memoryview) -> Header:
    """The header of a block whose bytes were checked before (by :func:`unpack`)."""
    return _header(_HEADER.unpack_from(data))


def unpack(data: bytes | memoryview, *, known: Collection[str]) -> tuple[Header, dict[str, Column]]:
    """Reads a block and checks every byte of it.

    Args:
        data: exactly one block.
        known: tags that the caller understands; other columns are checked and dropped.

    Returns:
        The header and the known columns by tag.

    Raises:
        TrajectoryFormatError: Or one of its kinds, whatever is wrong with the bytes.
    """
    view = memoryview(data)
    head = _read_head(view, len(view))
    length, crc_again, end = _TRAILER.unpack_from(view, len(view) - _TRAILER.size)
    if length != len(view) or end != END or crc_again != head.crc:
        raise TruncatedBlockError(
            f"block: the trailer does not close a block of {len(view)} bytes (cut or extended)",
            offset=len(view) - _TRAILER.size,
        )
    wanted = _wanted(head, known, known)
    columns: dict[str, Column] = {}
    for entry in head.entries:
        stored = view[entry.at : entry.at + entry.stored_length]
        _check_crc(entry, stored)
        if entry.tag in wanted:
            columns[entry.tag] = _column(entry, stored)
    return head.header, columns


def read_columns(
    file: BinaryIO,
    offset: int,
    size: int,
    *,
    known: Collection[str],
    wanted: Collection[str],
) -> tuple[Header, dict[str, Column]]:
    """Reads some columns of a block in a file, and no more of the file than these need.

    Header, directory and the columns that are read are checked as :func:`unpack` does; the other
    columns and the trailer are not looked at.

    Args:
        file: open for reading.
        offset: first byte of the block.
        size: bytes of the block.
        known: tags that the caller understands.
        wanted: tags to read; those that the block lacks are left out.

    Returns:
        The header and the wanted columns by tag.

    Raises:
        TrajectoryFormatError: Or one of its kinds, whatever is wrong with the bytes.
    """
    left = file.seek(0, os.SEEK_END) - offset
    if size > left:
        raise TruncatedBlockError(f"block: expected {size} bytes, the file has {max(left, 0)}")
    file.seek(offset)
    start = file.read(min(size, _HEAD_READ))
    if len(start) >= _HEADER.size:
        needed = _HEADER.size + _HEADER.unpack_from(start)[3] * _ENTRY.size + 4
        if len(start) < needed <= size:
            start += file.read(needed - len(start))
    head = _read_head(memoryview(start), size)
    tags = _wanted(head, known, wanted)
    columns = {}
    for entry in head.entries:
        if entry.tag not in tags:
            continue
        stored = start[entry.at : entry.at + entry.stored_length]
        if len(stored) < entry.stored_length:
            file.seek(offset + entry.at)
            stored = file.read(entry.stored_length)
        _check_crc(entry, stored)
        columns[entry.tag] = _column(entry, memoryview(stored))
    return head.header, columns


def _read_head(view: memoryview, size: int) -> _Head:
    """Checks header and directory of a block of ``size`` bytes, of which ``view`` is the start."""
    if bytes(view[: len(MAGIC)]) != MAGIC[: len(view)]:
        raise BadMagicError(
            f"block: not a trajectory block (it begins with {bytes(view[:8])!r})", offset=0
        )
    if size < _HEADER.size + 4 + _TRAILER.size or len(view) < _HEADER.size:
        raise TruncatedBlockError(f"block: expected at least 68 bytes, got {min(size, len(view))}")
    fields = _HEADER.unpack_from(view)
    major, num_columns, flags = fields[1], fields[3], fields[5]
    # Before the checksum: another major version may lay its header out in another way.
    if major != MAJOR:
        raise UnsupportedFormatError(
            f"block: format version {major}, this reader knows {MAJOR}", offset=8
        )
    body = _HEADER.size + num_columns * _ENTRY.size
    if size < body + 4 + _TRAILER.size or len(view) < body + 4:
        raise TruncatedBlockError(f"block: directory of {num_columns} columns is cut short")
    crc = int.from_bytes(view[body : body + 4], "little")
    if zlib.crc32(view[:body]) != crc:
        raise ChecksumError("block: checksum of the header does not match", offset=body)
    if flags & 0xFFFF & ~UNDERSTOOD_FLAGS:
        raise UnsupportedFormatError(
            f"block: unknown flags {flags:#x} that a reader must know", offset=16
        )
    entries, at = [], body + 4
    for name, dtype, codec, bits, raw_length, stored_length, column_crc in _ENTRY.iter_unpack(
        view[_HEADER.size : body]
    ):
        tag = name.decode("ascii", errors="backslashreplace")
        entries.append(_Entry(tag, dtype, codec, bits, raw_length, stored_length, column_crc, at))
        at += stored_length
    length = at + _TRAILER.size
    if length != size:
        raise TruncatedBlockError(
            f"block: column lengths add up to a block of {length} bytes, not {size}"
        )
    return _Head(_header(fields), entries, crc, length)


def _header(fields: tuple[int, ...]) -> Header:
    _, _, _, _, num_records, flags, mask_id, vocab_size, _, run_digest = fields
    return Header(
        num_records=num_records,
        flags=flags,
        mask_id=mask_id,
        vocab_size=vocab_size,
        run_digest=run_digest,  # type: ignore[arg-type]
    )


def _wanted(head: _Head, known: Collection[str], wanted: Collection[str]) -> set[str]:
    """The wanted tags that the block has; nothing is unpacked before these checks."""
    tags: set[str] = set()
    raw_total = 0
    for entry in head.entries:
        if entry.tag not in known:
            if entry.flags & MUST_UNDERSTAND:
                raise UnsupportedFormatError(
                    f"block: column {entry.tag!r} is required but unknown", offset=entry.at
                )
            continue
        if entry.tag not in wanted:
            continue
        if entry.tag in tags:
            raise InvariantError(f"block: column {entry.tag!r} appears twice", offset=entry.at)
        tags.add(entry.tag)
        raw_total += entry.raw_length
    limit = raw_limit(head.length)
    if raw_total > limit:
        raise InvariantError(
            f"block: columns unpack to {raw_total} bytes, expected at most {limit} of a block of "
            f"{head.length}"
        )
    return tags


def _check_crc(entry: _Entry, stored: bytes | memoryview) -> None:
    if len(stored) != entry.stored_length:
        raise TruncatedBlockError(f"block: column {entry.tag!r} is cut short", offset=entry.at)
    if zlib.crc32(stored) != entry.crc:
        raise ChecksumError(
            f"block: checksum of column {entry.tag!r} does not match", offset=entry.at
        )


def _column(entry: _Entry, stored: memoryview) -> Column:
    try:
        dtype = Dtype(entry.dtype)
    except ValueError:
        raise UnsupportedFormatError(
            f"block: column {entry.tag!r} has unknown dtype {entry.dtype}", offset=entry.at
        ) from None
    if entry.codec == Codec.RAW:
        data = bytes(stored)
    elif entry.codec == Codec.ZSTD:
        data = _inflate(entry, stored)
    elif entry.codec == Codec.ZSTD_DICTIONARY:
        raise UnsupportedFormatError(
            f"block: column {entry.tag!r} is packed with a zstd dictionary; only version 0.1 of "
            "lit-dlm could read such a block",
            offset=entry.at,
        )
    else:
        raise UnsupportedFormatError(
            f"block: column {entry.tag!r} has unknown codec {entry.codec}", offset=entry.at
        )
    if len(data) != entry.raw_length:
        raise InvariantError(
            f"block: column {entry.tag!r} must have {entry.raw_length} bytes, got {len(data)}",
            offset=entry.at,
        )
    return Column(entry.tag, dtype, data, entry.flags)


def _inflate(entry: _Entry, stored: memoryview) -> bytes:
    try:
        # The size in the frame decides what gets allocated: it must be the directory's.
        if zstandard.frame_content_size(stored) != entry.raw_length:
            raise InvariantError(
                f"block: column {entry.tag!r} disagrees about its length", offset=entry.at
            )
        return _decompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise TrajectoryFormatError(
            f"block: column {entry.tag!r} does not unpack: {error}", offset=entry.at
        ) from error


def _compressor(level: int) -> zstandard.ZstdCompressor:
    """One compressor per thread and level: making one costs more than a small column."""
    cache: dict[int, zstandard.ZstdCompressor] = _LOCAL.__dict__.setdefault("compressors", {})
    if level not in cache:
        cache[level] = zstandard.ZstdCompressor(
            level=level, write_checksum=False, write_content_size=True
        )
    return cache[level]


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_LOCAL, "decompressor"):
        _LOCAL.decompressor = zstandard.ZstdDecompressor()
    decompressor: zstandard.ZstdDecompressor = _LOCAL.decompressor
    return decompressor


# -- arrays and texts as columns -----------------------------------------------------------------

NUMPY_DTYPES: dict[Dtype, str] = {
    Dtype.U8: "u1",
    Dtype.U16: "<u2",
    Dtype.U32: "<u4",
    Dtype.U64: "<u8",
    Dtype.F16: "<f2",
    Dtype.F32: "<f4",
    Dtype.I8: "i1",
}


def make_column(tag: str, dtype: Dtype, values: NDArray[Any]) -> Column:
    """A column of the stored type ``dtype``."""
    if dtype is Dtype.U24:
        return Column(tag, dtype, pack_u24(values))
    return Column(tag, dtype, values.astype(NUMPY_DTYPES[dtype]).tobytes())


class ColumnReader:
    """Columns of a block as arrays whose length is known beforehand."""

    def __init__(
        self, columns: Mapping[str, Column], dtypes: Mapping[str, tuple[Dtype, ...]]
    ) -> None:
        """Checks the element types.

        Args:
            columns: by tag.
            dtypes: the allowed element types of every tag.
        """
        self.columns = columns
        for tag, column in columns.items():
            if column.dtype not in dtypes[tag]:
                raise TrajectoryFormatError(f"block: column {tag!r} may not be {column.dtype.name}")

    def raw(self, tag: str, length: int) -> bytes:
        """The bytes of a column that must have ``length`` of them."""
        data = self.columns[tag].data
        if len(data) != length:
            raise TrajectoryFormatError(
                f"block: column {tag!r} must have {length} bytes, got {len(data)}"
            )
        return data

    def array(self, tag: str, count: int) -> NDArray[Any]:
        """``(count,)`` of the stored type, read-only."""
        dtype = np.dtype(NUMPY_DTYPES[self.columns[tag].dtype])
        return np.frombuffer(self.raw(tag, count * dtype.itemsize), dtype=dtype)

    def integers(self, tag: str, count: int) -> NDArray[np.int64]:
        """``(count,)`` int64."""
        return self.array(tag, count).astype(np.int64)

    def tokens(self, tag: str, count: int) -> NDArray[np.int32]:
        """``(count,)`` int32 of a three-byte column."""
        return unpack_u24(self.raw(tag, 3 * count))


def pack_texts(length_format: str, texts: Sequence[bytes]) -> bytes:
    """Each text behind its length."""
    length = struct.Struct(length_format)
    return b"".join(part for text in texts for part in (length.pack(len(text)), text))


def split_texts(length_format: str, column: Column, n: int) -> list[bytes]:
    """The inverse of :func:`pack_texts` for exactly ``n`` texts."""
    length = struct.Struct(length_format)
    width, unpack_from = length.size, length.unpack_from
    data, at, texts = column.data, 0, []
    try:
        for _ in range(n):
            (size,) = unpack_from(data, at)
            start = at + width
            at = start + size
            texts.append(data[start:at])
    except struct.error:
        at = len(data) + 1
    if at != len(data):
        word = "short" if at > len(data) else "long"
        raise TrajectoryFormatError(f"block: column {column.tag!r} is too {word}")
    return texts


def unpack_texts(length_format: str, column: Column, n: int) -> list[str]:
    """:func:`split_texts` decoded as UTF-8."""
    try:
        return [text.decode() for text in split_texts(length_format, column, n)]
    except UnicodeDecodeError as error:
        raise TrajectoryFormatError(f"block: column {column.tag!r} is not UTF-8") from error


def pack_u24(values: NDArray[Any]) -> bytes:
    """Integers below 2**24 as three bytes each, little-endian."""
    words = np.ascontiguousarray(values, dtype="<u4")
    return words.view(np.uint8).reshape(-1, 4)[:, :3].tobytes()


def unpack_u24(data: bytes) -> NDArray[np.int32]:
    """The inverse of :func:`pack_u24`: ``(N,)`` int32."""
    # Overlapping four-byte words, three bytes apart; the fourth byte belongs to the next number.
    words = np.ndarray((len(data) // 3,), dtype="<i4", buffer=data + b"\0", strides=(3,))
    return np.bitwise_and(words, 0xFFFFFF, dtype=np.int32)
