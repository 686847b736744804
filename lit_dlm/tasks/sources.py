"""Rows of a benchmark from a local file or a hub data set, with one clear error per bad input."""

from __future__ import annotations

import ast
import csv
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError

from lit_dlm.grading.child.extraction import CANDIDATE_FILE
from lit_dlm.trajectories.exchange import Allowance, json_object, numbered_lines, parsed_json
from lit_dlm.vision.pictures import Picture

logger = logging.getLogger(__name__)

_UNREACHABLE: tuple[type[Exception], ...] = HfHubHTTPError.__bases__
"""Errors of connecting to the hub: OSErrors, or those of its client's HTTP library."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One record and where it came from."""

    index: int  # position in the source from 0; part of the sample's uid
    origin: str  # file and line (or data set and row), for error messages
    fields: dict[str, Any]

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
        try:
            return ast.parse(code, CANDIDATE_FILE)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"{self.origin}: {code[:60]!r} does not parse ({error})") from None

    def pictures(self, folder: Path) -> tuple[Picture, ...]:
        """Returns ``images`` or ``image``: paths in ``folder``, or as data sets hold them."""
        given = self.fields.get("images") or self.fields.get("image") or []
        found = []
        for value in given if isinstance(given, list) else [given]:
            if isinstance(value, dict):
                value = value.get("bytes") or value.get("path")
            is_right = isinstance(value, str | bytes)
            self.expect(is_right, "paths or pictures in field 'images'", value)
            source = folder / value if isinstance(value, str) else value
            try:
                found.append(Picture(source, name=None if isinstance(value, str) else self.origin))
            except ValueError as error:
                raise ValueError(f"{self.origin}: {error}") from error
        return tuple(found)


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
    files = [path / f"{split}{suffix}" for suffix in _READERS]
    path = next((file for file in files if file.is_file()), path)
    if not path.exists():
        raise ValueError(f"{option}: there is no file or folder {str(path)!r}")
    read = next((read for suffix, read in _READERS.items() if path.name.endswith(suffix)), None)
    if read is None or not path.is_file():
        wanted = f"a file ending in {', '.join(_READERS)}, or a folder with one named {split}"
        raise ValueError(f"{option}: expected {wanted}, got {str(path)!r}")
    return read(path)


def _read_json_lines(path: Path) -> Iterator[Row]:
    for index, (number, line) in enumerate(numbered_lines(path)):
        origin = f"{path}, line {number}"
        fields = json_object(origin, parsed_json(origin, line))
        yield Row(index=index, origin=origin, fields=fields)


def _read_json(path: Path) -> Iterator[Row]:
    try:
        values = parsed_json(str(path), path.read_bytes())
    except ValueError as error:
        hint = "; a file with a row per line is a .jsonl" if "Extra data" in str(error) else ""
        raise ValueError(f"{error}{hint}") from None
    if not isinstance(values, list):
        raise ValueError(f"{path}: expected a JSON list of objects, got {type(values).__name__}")
    for index, value in enumerate(values):
        origin = f"{path}, item {index + 1}"
        yield Row(index=index, origin=origin, fields=json_object(origin, value))


def _read_csv(path: Path) -> Iterator[Row]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        try:
            for index, fields in enumerate(reader):
                origin = f"{path}, line {reader.line_num}"
                row = Row(index=index, origin=origin, fields=dict(fields))
                is_whole = None not in fields and None not in fields.values()
                row.expect(is_whole, f"{len(reader.fieldnames or ())} values", [*fields.values()])
                yield row
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path}, after line {reader.line_num}: {error}") from None


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    index, allowance = 0, Allowance(path)
    try:
        file = pyarrow.parquet.ParquetFile(path)
        groups = map(file.metadata.row_group, range(file.num_row_groups))
        chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
        # Equal values are stored once, and nulls not at all: first count what the metadata declare.
        stored = [chunk.total_uncompressed_size for chunk in chunks]
        Allowance(path).take(sum(stored), max((chunk.num_values for chunk in chunks), default=0))
        # Each cell may be as large as all that its column stores.
        at_once = min(max(allowance.most // (max(stored, default=0) + 1), 1), 1024)
        for batch in file.iter_batches(at_once):
            plain = [
                column.dictionary_decode() if pyarrow.types.is_dictionary(column.type) else column
                for column in batch.columns
            ]
            allowance.take(sum(column.nbytes for column in plain), batch.num_rows)
            for fields in batch.to_pylist():
                yield Row(index=index, origin=f"{path}, row {index + 1}", fields=fields)
                index += 1
    except (pyarrow.ArrowInvalid, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path}: not a readable parquet file ({reason})") from None


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
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
        if not _is_reachable(source):
            constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        loaded = datasets.load_dataset(source, config, split=split)
        for name, feature in loaded.features.items():
            one, raw = getattr(feature, "feature", feature), datasets.Image(decode=False)
            if isinstance(one, datasets.Image):  # as bytes, which are checked before decoding
                loaded = loaded.cast_column(name, raw if one is feature else type(feature)(raw))
        found = list(loaded)
    except (*_UNREACHABLE, ValueError, datasets.exceptions.DatasetsError) as e:
        reason = (str(e).strip().splitlines() or [""])[0]
        raise ValueError(
            f"{option}: {source!r} is no local file, and it could not be loaded from the hub "
            f"({type(e).__name__}: {reason}). Give a local file, or check the name and the network"
        ) from None
    return [
        Row(index=index, origin=f"{source}/{split}, row {index + 1}", fields=dict(fields))
        for index, fields in enumerate(found)
    ]
