"""Arrays and texts to column bytes and back."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_dlm.trajectories.columns import Int32, Int64
from lit_dlm.trajectories.container import Column, Dtype
from lit_dlm.trajectories.errors import TrajectoryFormatError

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

    def integers(self, tag: str, count: int) -> Int64:
        """``(count,)`` int64."""
        return self.array(tag, count).astype(np.int64)

    def tokens(self, tag: str, count: int) -> Int32:
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


def unpack_u24(data: bytes) -> Int32:
    """The inverse of :func:`pack_u24`: ``(N,)`` int32."""
    # Overlapping four-byte words, three bytes apart; the fourth byte belongs to the next number.
    words = np.ndarray((len(data) // 3,), dtype="<i4", buffer=data + b"\0", strides=(3,))
    return np.bitwise_and(words, 0xFFFFFF, dtype=np.int32)
