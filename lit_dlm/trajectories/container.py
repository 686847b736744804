"""The byte layout of a block: header, column directory, payloads, trailer.

This module knows nothing about trajectories. It stores named columns of bytes, each raw or
zstd-compressed, so that every bit of the block is covered by a checksum, nothing is executed on
reading, and a damaged or hostile header cannot make the reader allocate more than its cap.

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

import struct
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import zstandard

from lit_dlm.trajectories.errors import (
    ChecksumError,
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
"""Default cap on the unpacked columns of one block."""

_HEADER = struct.Struct("<8sBBHIIIII16s")
_ENTRY = struct.Struct("<4sBBHQQI")
_TRAILER = struct.Struct("<QI4s")
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
    """How a column is stored. zstd with a dictionary (2) is reserved and not read yet."""

    RAW = 0
    ZSTD = 1


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


def pack(header: Header, columns: Sequence[Column], *, level: int) -> bytes:
    """Writes a block.

    Args:
        header: facts about the block.
        columns: in the order in which they are stored.
        level: zstd level; a column that does not shrink is stored raw.

    Returns:
        The bytes of the block.
    """
    compressor = _compressor(level)
    directory, payloads = [], []
    for column in columns:
        stored, codec = column.data, Codec.RAW
        if len(column.data) > 16:
            packed = compressor.compress(column.data)
            if len(packed) < len(column.data):
                stored, codec = packed, Codec.ZSTD
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
        0,
        header.run_digest,
    ) + b"".join(directory)
    crc = zlib.crc32(head)
    length = len(head) + 4 + sum(map(len, payloads)) + _TRAILER.size
    return b"".join([head, crc.to_bytes(4, "little"), *payloads, _TRAILER.pack(length, crc, END)])


def read_header(data: bytes | memoryview) -> Header:
    """The header of a block whose bytes were checked before (by :func:`unpack`)."""
    _, _, _, _, *numbers, run_digest = _HEADER.unpack_from(data)
    num_records, flags, mask_id, vocab_size, _ = numbers
    return Header(
        num_records=num_records,
        flags=flags,
        mask_id=mask_id,
        vocab_size=vocab_size,
        run_digest=run_digest,
    )


def unpack(
    data: bytes | memoryview, *, known: Sequence[str], max_raw_bytes: int = MAX_RAW_BYTES
) -> tuple[Header, dict[str, Column]]:
    """Reads a block and checks every byte of it.

    Args:
        data: exactly one block.
        known: tags that the caller understands; other columns are checked and dropped.
        max_raw_bytes: refuse a block whose columns unpack to more than this.

    Returns:
        The header and the known columns by tag.

    Raises:
        TrajectoryFormatError: Or one of its kinds, whatever is wrong with the bytes.
    """
    view = memoryview(data)
    if len(view) < _HEADER.size + 4 + _TRAILER.size:
        raise TruncatedBlockError(f"block: expected at least 68 bytes, got {len(view)}")
    magic, major, _minor, num_columns, *numbers, run_digest = _HEADER.unpack_from(view)
    num_records, flags, mask_id, vocab_size, dictionary = numbers
    if magic != MAGIC:
        raise TrajectoryFormatError(f"block: not a trajectory block (it begins with {magic!r})")
    body = _HEADER.size + num_columns * _ENTRY.size
    if len(view) < body + 4 + _TRAILER.size:
        raise TruncatedBlockError(f"block: directory of {num_columns} columns is cut short")
    crc = int.from_bytes(view[body : body + 4], "little")
    if zlib.crc32(view[:body]) != crc:
        raise ChecksumError("block: checksum of the header does not match")
    if major != MAJOR:
        raise UnsupportedFormatError(f"block: format version {major}, this reader knows {MAJOR}")
    if flags & 0xFFFF & ~UNDERSTOOD_FLAGS or dictionary:
        raise UnsupportedFormatError(
            f"block: unknown flags {flags:#x} or dictionary {dictionary} that a reader must know"
        )
    length, crc_again, end = _TRAILER.unpack_from(view, len(view) - _TRAILER.size)
    if length != len(view) or end != END or crc_again != crc:
        raise TruncatedBlockError(
            f"block: the trailer does not close a block of {len(view)} bytes (cut or extended)"
        )
    entries = list(_ENTRY.iter_unpack(view[_HEADER.size : body]))
    raw_total = sum(entry[4] for entry in entries)
    stored_total = sum(entry[5] for entry in entries)
    if raw_total > max_raw_bytes:
        raise TrajectoryFormatError(
            f"block: columns unpack to {raw_total} bytes, the cap is {max_raw_bytes}"
        )
    if body + 4 + stored_total + _TRAILER.size != len(view):
        raise TruncatedBlockError("block: column lengths do not add up to the block length")
    columns: dict[str, Column] = {}
    at = body + 4
    for name, dtype, codec, column_flags, raw_length, stored_length, column_crc in entries:
        stored = view[at : at + stored_length]
        at += stored_length
        tag = name.decode("ascii", errors="backslashreplace")
        if zlib.crc32(stored) != column_crc:
            raise ChecksumError(f"block: checksum of column {tag!r} does not match")
        if tag not in known:
            if column_flags & MUST_UNDERSTAND:
                raise UnsupportedFormatError(f"block: column {tag!r} is required but unknown")
            continue
        if tag in columns:
            raise TrajectoryFormatError(f"block: column {tag!r} appears twice")
        columns[tag] = Column(tag, _dtype(tag, dtype), _inflate(tag, codec, stored, raw_length))
    header = Header(
        num_records=num_records,
        flags=flags,
        mask_id=mask_id,
        vocab_size=vocab_size,
        run_digest=run_digest,
    )
    return header, columns


def _dtype(tag: str, code: int) -> Dtype:
    try:
        return Dtype(code)
    except ValueError:
        raise UnsupportedFormatError(f"block: column {tag!r} has unknown dtype {code}") from None


def _inflate(tag: str, codec: int, stored: memoryview, raw_length: int) -> bytes:
    if codec == Codec.RAW:
        if len(stored) != raw_length:
            raise TrajectoryFormatError(f"block: column {tag!r} is raw but changes its length")
        return bytes(stored)
    if codec != Codec.ZSTD:
        raise UnsupportedFormatError(f"block: column {tag!r} has unknown codec {codec}")
    try:
        # The size in the frame decides what gets allocated: it must be the directory's.
        if zstandard.frame_content_size(stored) != raw_length:
            raise TrajectoryFormatError(f"block: column {tag!r} disagrees about its length")
        data = _decompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise TrajectoryFormatError(f"block: column {tag!r} does not unpack: {error}") from error
    if len(data) != raw_length:
        raise TrajectoryFormatError(f"block: column {tag!r} unpacks to a wrong length")
    return data


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
