from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest

from lit_dlm.trajectories import TrajectoryFormatError
from lit_dlm.trajectories import container as layout
from lit_dlm.trajectories.errors import (
    BadMagicError,
    ChecksumError,
    InvariantError,
    TruncatedBlockError,
    UnsupportedFormatError,
)

KNOWN = ("AAAA", "BBBB", "CCCC")
HEADER = layout.Header(num_records=2, flags=0, mask_id=1, vocab_size=5, run_digest=bytes(16))


def block(**columns: bytes) -> bytes:
    parts = [layout.Column(tag, layout.Dtype.BYTES, data) for tag, data in columns.items()]
    return layout.pack(HEADER, parts, level=3)


def with_entry(data: bytes, column: int, field: int, value: int, code: str) -> bytes:
    """The block with one directory field changed and its header checksums made anew."""
    changed = bytearray(data)
    struct.pack_into(code, changed, 48 + 28 * column + field, value)
    body = 48 + 28 * struct.unpack_from("<H", data, 10)[0]
    changed[body : body + 4] = changed[-8:-4] = struct.pack("<I", zlib.crc32(changed[:body]))
    return bytes(changed)


def test_each_damage_has_its_class() -> None:
    data = block(AAAA=b"x" * 100, BBBB=b"12345")
    cases = [
        (b"PK" + data[2:], BadMagicError, 0),
        (data.replace(b"\r\n", b"\n", 1), BadMagicError, 0),
        (data[:40], TruncatedBlockError, None),
        (data[:-1], TruncatedBlockError, None),
        (data[:8] + b"\2" + data[9:], UnsupportedFormatError, 8),
        (data[:50] + b"?" + data[51:], ChecksumError, 48 + 2 * 28),
        (data[:-17] + b"?" + data[-16:], ChecksumError, len(data) - 16 - 5),
        (with_entry(data, 0, 4, 77, "<B"), UnsupportedFormatError, 48 + 2 * 28 + 4),
        (with_entry(data, 0, 5, 3, "<B"), UnsupportedFormatError, 48 + 2 * 28 + 4),
        (with_entry(data, 1, 8, 6, "<Q"), InvariantError, len(data) - 16 - 5),
    ]
    for damaged, kind, offset in cases:
        with pytest.raises(kind) as error:
            layout.unpack(damaged, known=KNOWN)
        assert type(error.value) is kind
        assert error.value.offset == offset


def test_a_newer_major_version_is_named_although_its_header_is_different() -> None:
    """Its checksum lies elsewhere, so it must not be looked at first."""
    with pytest.raises(UnsupportedFormatError, match="format version 2"):
        layout.unpack(layout.MAGIC + b"\2" + bytes(100), known=KNOWN)


def test_unknown_columns_do_not_count_towards_the_cap() -> None:
    """256 MB of an optional column that is never unpacked, under a cap of 32 MB and a bit."""
    data = block(AAAA=b"abc", ZZZZ=b"12345")
    data = with_entry(data, 1, 8, 2**28, "<Q")
    _, columns = layout.unpack(data, known=KNOWN)
    assert {tag: column.data for tag, column in columns.items()} == {"AAAA": b"abc"}
    with pytest.raises(InvariantError, match=r"unpack to 268435459 bytes, expected at most 335"):
        layout.unpack(data, known=(*KNOWN, "ZZZZ"))


def test_a_column_that_appears_twice_is_refused() -> None:
    parts = [layout.Column("AAAA", layout.Dtype.BYTES, bytes([i])) for i in range(2)]
    with pytest.raises(InvariantError, match="'AAAA' appears twice"):
        layout.unpack(layout.pack(HEADER, parts, level=3), known=KNOWN)


def test_some_columns_are_read_without_the_others() -> None:
    """The long column behind a directory of 100 columns is damaged, and nobody notices."""
    rng = np.random.default_rng(0)
    many = {f"{i:04d}": rng.bytes(30) for i in range(97)}
    data = block(AAAA=b"abc", CCCC=rng.bytes(5000), BBBB=bytes(400), **many)
    at = data.index(many["0000"]) - 1000
    damaged = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    file = io.BytesIO(b"before" + damaged + b"after")
    known = (*KNOWN, *many)
    header, columns = layout.read_columns(
        file, 6, len(data), known=known, wanted=("AAAA", "BBBB", "0096", "none")
    )
    assert header == HEADER
    assert {tag: column.data for tag, column in columns.items()} == {
        "AAAA": b"abc",
        "BBBB": bytes(400),
        "0096": many["0096"],
    }
    with pytest.raises(ChecksumError, match="'CCCC'"):
        layout.read_columns(file, 6, len(data), known=known, wanted=("CCCC",))
    for size in (0, 30, 60, 1000, len(data) - 20):
        with pytest.raises(TrajectoryFormatError):
            layout.read_columns(io.BytesIO(data[:size]), 0, size, known=known, wanted=("CCCC",))
        with pytest.raises(TrajectoryFormatError):
            layout.read_columns(
                io.BytesIO(data[:size]), 0, len(data), known=known, wanted=("0096",)
            )


def test_three_byte_numbers_round_trip() -> None:
    values = np.array([0, 1, 255, 256, 65535, 65536, 2**24 - 1, 7], dtype=np.int32)
    packed = layout.pack_u24(values)
    assert packed[3:9] == b"\1\0\0\xff\0\0"
    assert packed[-6:] == b"\xff\xff\xff\7\0\0"
    np.testing.assert_array_equal(layout.unpack_u24(packed), values)
    assert len(layout.unpack_u24(b"")) == 0
