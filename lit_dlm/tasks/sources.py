"""Rows of a benchmark from a local file or a hub data set, with one clear error per bad input."""

from __future__ import annotations

import ast
import contextlib
import csv
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError

from lit_dlm.grading.child.extraction import CANDIDATE_FILE
from lit_dlm.system.json_lines import Allowance, json_object, numbered_lines, parsed_json
from lit_dlm.vision.pictures import Picture

logger = logging.getLogger(__name__)

_UNREACHABLE: tuple[type[Exception], ...] = HfHubHTTPError.__bases__
"""Errors of connecting to the hub: OSErrors, or those of its client's HTTP library."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One record and where it came from."""

    index: int  # position in the source from 0; part of the sample's uid
    origin: str  # file and line (or data set and row), for error messages
    fields: dict[str, Any]
    folders: tuple[Path, ...] = ()
    """Where pictures lie, relative paths in the first; empty where the user wrote the row."""

    def expect(self, holds: bool, wanted: str, got: object) -> None:
        """Raises an error that names file and line, unless the row holds what it should."""
        if not holds:
            raise ValueError(f"{self.origin}: expected {wanted}, got {got!r:.200}")

    def get(self, name: str, kind: type | tuple[type, ...], wanted: str) -> Any:
        value = self.fields.get(name)
        is_right = isinstance(value, kind) and not isinstance(value, bool)
        self.expect(is_right, f"{wanted} in field {name!r}", value)
        return value

    def text(self, name: str) -> str:
        return str(self.get(name, str, "a text"))

    def texts(self, name: str) -> list[str]:
        values = self.get(name, list, "a list of texts")
        is_right = bool(values) and all(isinstance(value, str) for value in values)
        self.expect(is_right, f"a list of at least one text in field {name!r}", values)
        return list(values)

    def parsed(self, code: str) -> ast.Module:
        with refusing(f"{self.origin}: {code[:60]!r} does not parse", SyntaxError, ValueError):
            return ast.parse(code, CANDIDATE_FILE)

    def pictures(self) -> tuple[Picture, ...]:
        """Returns ``images`` or ``image``: paths in the folders, or as data sets hold them."""
        given = self.fields.get("images") or self.fields.get("image") or []
        pictures = []
        for value in given if isinstance(given, list) else [given]:
            if isinstance(value, dict):  # as ``datasets`` stores a picture
                value = value.get("bytes") or value.get("path")
            is_right = isinstance(value, str | bytes)
            self.expect(is_right, "paths or pictures in field 'images'", value)
            try:
                pictures.append(self._picture(value))
            except (ValueError, OSError) as error:
                raise ValueError(f"{self.origin}: {error}") from error
        return tuple(pictures)

    def _picture(self, given: str | bytes) -> Picture:
        if isinstance(given, bytes):
            return Picture(given, name=self.origin)
        path = Path(*self.folders[:1], given)
        target, folders = Path(os.path.realpath(path)), map(os.path.realpath, self.folders)
        # Data of others must not name other files of the user, through a link either.
        if self.folders and not any(map(target.is_relative_to, folders)):
            raise ValueError(f"expected a picture inside {self.folders[0]}, got {given!r:.200}")
        return Picture(path)


@contextlib.contextmanager
def refusing(problem: str, *kinds: type[Exception]) -> Iterator[None]:
    """Makes errors of these kinds a ``ValueError`` of one line, the reason in brackets."""
    try:
        yield
    except kinds as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{problem} ({reason})") from None


def read_rows(
    source: str,
    *,
    split: str,
    required: Sequence[str],
    config: str | None = None,
    option: str = "path",
) -> list[Row]:
    """Reads all rows of a local file, of one split in a local folder, or of a hub data set.

    ``source`` is a ``.jsonl``, ``.jsonl.gz``, ``.json`` (a list of objects), ``.csv`` (all values
    stay text) or ``.parquet`` file; a folder with a file named after the split; or a hub id such as
    ``openai/gsm8k``, taken only if nothing local has that name. Errors call it ``option``.
    """
    path = Path(source).expanduser()
    if on_hub(source):
        rows = _read_hub(source, config=config, split=split, option=option)
    else:
        rows = list(_read_local(path, split, option))
    if not rows:
        raise ValueError(f"{option}: expected at least one row, {source} is empty")
    # All of them before any work: a run that fails at row 900 has decoded 899 prompts for nothing.
    for row in rows:
        for name in required:
            row.expect(name in row.fields, f"a field {name!r}", list(row.fields))
    return rows


def on_hub(source: str) -> bool:
    """Whether a source is looked up on the hub: it is no local file and does not look like one."""
    # A mistyped path must not become a network request.
    looks_local = source.endswith(tuple(_READERS)) or source.startswith(("/", ".", "~"))
    return not (looks_local or source.count("/") > 1 or Path(source).expanduser().exists())


def _read_local(path: Path, split: str, option: str) -> Iterator[Row]:
    # In the order of _READERS, so that a folder with two forms of a split has one reading.
    files = [path / f"{split}{suffix}" for suffix in _READERS]
    path = next((file for file in files if file.is_file()), path)
    if not path.exists():
        raise ValueError(f"{option}: there is no file or folder {str(path)!r}")
    read = next((read for suffix, read in _READERS.items() if path.name.endswith(suffix)), None)
    if read is None or not path.is_file():
        wanted = f"a file ending in {', '.join(_READERS)}, or a folder with one named {split}"
        raise ValueError(f"{option}: expected {wanted}, got {str(path)!r}")
    allowance = Allowance(path)
    # A file may be a link into the hub's cache, where its pictures are then too.
    folders = (path.parent, Path(os.path.realpath(path)).parent)
    for index, (origin, fields) in enumerate(read(path)):
        allowance.take(_memory_of([origin, fields]), 1)
        yield Row(index=index, origin=origin, fields=fields, folders=folders)


def _memory_of(value: object) -> int:
    """Returns the bytes that a value takes, with all that it holds."""
    total, left = 0, [value]
    while left:  # not recursive: JSON may be nested almost as deeply as Python's stack allows
        one = left.pop()
        total += sys.getsizeof(one)
        if isinstance(one, (dict, list, tuple)):
            held = [*one, *one.values()] if isinstance(one, dict) else one
            left += {id(part): part for part in held}.values()  # a small number exists once
    return total


def _read_json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in numbered_lines(path):
        origin = f"{path}, line {number}"
        yield origin, json_object(origin, parsed_json(origin, line))


def _read_json(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        values = parsed_json(str(path), path.read_bytes())
    except ValueError as error:
        hint = "; a file with a row per line is a .jsonl" if "Extra data" in str(error) else ""
        raise ValueError(f"{error}{hint}") from None
    if not isinstance(values, list):
        raise ValueError(f"{path}: expected a JSON list of objects, got {type(values).__name__}")
    for number, value in enumerate(values, start=1):
        origin = f"{path}, item {number}"
        yield origin, json_object(origin, value)


def _read_csv(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        try:
            for fields in reader:
                origin = f"{path}, line {reader.line_num}"
                if None in fields or None in fields.values():
                    wanted, got = len(reader.fieldnames or ()), [*fields.values()]
                    raise ValueError(f"{origin}: expected {wanted} values, got {got!r:.200}")
                yield origin, fields
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path}, after line {reader.line_num}: {error}") from None


def _read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    number, allowance = 0, Allowance(path)
    unreadable = pyarrow.ArrowInvalid, OSError
    with refusing(f"{path}: not a readable parquet file", *unreadable):
        file = pyarrow.parquet.ParquetFile(path)
        groups = map(file.metadata.row_group, range(file.num_row_groups))
        chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
        # Equal values are stored once, and nulls not at all: first count what the metadata declare.
        stored = [chunk.total_uncompressed_size for chunk in chunks]
        Allowance(path).take(sum(stored), max((chunk.num_values for chunk in chunks), default=0))
        # Each cell may be as large as all that its column stores.
        at_once = min(max(allowance.most // (max(stored, default=0) + 1), 1), 1024)
        for batch in file.iter_batches(at_once):
            # A value of a dictionary is stored once, but Python makes a text of it in every row.
            plain = [
                column.dictionary_decode() if pyarrow.types.is_dictionary(column.type) else column
                for column in batch.columns
            ]
            allowance.take(sum(column.nbytes for column in plain), batch.num_rows)
            for fields in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", fields


_READERS: dict[str, Callable[[Path], Iterator[tuple[str, dict[str, Any]]]]] = {
    ".jsonl": _read_json_lines,
    ".jsonl.gz": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _is_reachable(source: str) -> bool:
    """Whether the hub answers a single request; loading would try for a minute before it fails."""
    try:
        if not constants.HF_HUB_OFFLINE:
            HfApi().dataset_info(source, timeout=10.0)
    except (HfHubHTTPError, ValueError):
        pass  # it answers, and loading reports what is wrong
    except _UNREACHABLE:
        return False
    return True


def _read_hub(source: str, *, config: str | None, split: str, option: str) -> list[Row]:
    # Imported here: it takes seconds, and local files never need it.
    import datasets

    logger.info("loading %s (%s) from the hub or its cache", source, split)
    try:
        # Offline, both libraries go straight to their caches, where the set may be.
        if not _is_reachable(source):
            constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        loaded = datasets.load_dataset(source, config, split=split)
        for name, feature in loaded.features.items():
            one, raw = getattr(feature, "feature", feature), datasets.Image(decode=False)
            if isinstance(one, datasets.Image):  # as bytes, which are checked before decoding
                loaded = loaded.cast_column(name, raw if one is feature else type(feature)(raw))
        records = list(loaded)
    except (*_UNREACHABLE, ValueError, datasets.exceptions.DatasetsError) as e:
        reason = (str(e).strip().splitlines() or [""])[0]
        raise ValueError(
            f"{option}: {source!r} is no local file, and it could not be loaded from the hub "
            f"({type(e).__name__}: {reason}). Give a local file, or check the name and the network"
        ) from None
    cached = Path(constants.HF_HUB_CACHE, f"datasets--{source.replace('/', '--')}")
    folders = (cached, Path(datasets.config.HF_DATASETS_CACHE, "downloads"))  # of archives
    rows = f"{source}/{split}, row"
    return [
        Row(index=index, origin=f"{rows} {index + 1}", fields=dict(fields), folders=folders)
        for index, fields in enumerate(records)
    ]
