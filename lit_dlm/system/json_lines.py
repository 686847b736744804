"""Reads JSON and JSON lines of strangers: bounded memory, and errors that say where."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

_LONGEST_LINE = 32 << 20
_ALWAYS_ALLOWED = 64 << 20
_MOST_UNPACKED = 100
"""Bytes of memory allowed per byte of a file; texts compress to a tenth, pictures do not."""
_BYTES_OF_ROW = 128
_BYTES_OF_VALUE = 64


def json_object(where: str, value: Any) -> dict[str, Any]:
    """Returns a JSON value that must be an object; the error says ``where`` it is."""
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value


def parsed_json(where: str, text: bytes) -> Any:
    """Parses JSON, whoever wrote it; the error says ``where`` it is."""
    try:
        value = json.loads(text)
        if b"\\ud" in text.lower():  # half of a surrogate pair, which no tokenizer takes
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as error:  # also if the bytes are not text
        raise ValueError(f"{where}: not valid JSON ({error})") from None


class Allowance:
    """Limits the memory that rows of a file may take: bytes of their values, and some per row."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.most = _ALWAYS_ALLOWED + _MOST_UNPACKED * path.stat().st_size
        self._taken = 0

    def take(self, size: int, rows: int, *, at_once: int = 0) -> None:
        """Counts rows; ``at_once`` is what alone may not be larger either."""
        self._taken += size + rows * _BYTES_OF_ROW
        if max(self._taken, at_once) > self.most:
            most = f"{self.most >> 20} MiB in a file of this size"
            raise ValueError(f"{self.path}: expected rows of at most {most}, got more")


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields the lines that are not blank, with numbers from 1; ``.gz`` files are unpacked."""
    if path.is_dir() or not path.exists():
        raise ValueError(f"{path}: there is no such file")
    number, allowance = 0, Allowance(path)
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            lines = iter(partial(file.readline, _LONGEST_LINE + 1), b"")
            for number, line in enumerate(lines, start=1):
                if len(line) > _LONGEST_LINE:
                    most = f"{_LONGEST_LINE >> 20} MiB"
                    raise ValueError(f"{path}, line {number}: expected at most {most}, got more")
                has_row = bool(line.strip())
                # Parsed, its values may take far more than the line does.
                values = sum(map(line.count, (b"[", b"{", b",")))
                allowance.take(len(line), has_row, at_once=_BYTES_OF_VALUE * values)
                if has_row:
                    yield number, line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: damaged or cut off after line {number} ({error})") from None
