"""Lines of text files that may be gzipped, with their numbers."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank; a name that ends in ``.gz`` is unpacked.

    Args:
        path: the file.

    Yields:
        The number of the line in the file, from 1, and its bytes.

    Raises:
        ValueError: the packed file is damaged or cut off, naming it and its last whole line.
    """
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: damaged or cut off after line {number} ({error})") from None
