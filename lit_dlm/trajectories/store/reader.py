"""Reads shards as webdataset streams, and single blocks at the places that side files name.

A damaged tar header ends a tar stream without any error, and flipped payload bits pass through it.
So every block is checked by the codec, and what a stream leaves out is read by its offset.
"""

from __future__ import annotations

import logging
import os
import tarfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from lit_dlm.trajectories.container import ColumnReader, read_columns, read_header, unpack_texts
from lit_dlm.trajectories.errors import InvariantError, ShardError, TrajectoryFormatError
from lit_dlm.trajectories.features import FeatureOutline, attach_features, read_feature_outline
from lit_dlm.trajectories.format import (
    DTYPES,
    FLAG_FEATURES,
    decode_block,
    read_given,
    read_metas,
)
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.store.files import (
    BlockEntry,
    SideFile,
    doubled,
    shards_in,
    side_path,
)

logger = logging.getLogger(__name__)

# Before webdataset is imported: it then refuses to unpickle members.
os.environ.setdefault("WDS_SECURE", "1")


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockOutline:
    """What an index of a set needs to know about the ``n`` records of a block, in their order."""

    uids: list[str]
    """``n`` names."""
    num_steps: NDArray[np.int64]
    """``(n,)`` executed steps."""
    lengths: NDArray[np.int64]
    """``(n, 2)`` tokens of prompt and response."""
    metas: list[dict[str, Any]]
    """``n`` metas, empty where a record has none."""
    has_written: NDArray[np.bool_] | None
    """``(n,)``: some step wrote a token that stands at the end. ``None`` if not asked for."""
    features: FeatureOutline | None
    """The kept steps and the layout of their features; ``None`` where the block has none, or they
    were not asked for."""


class TrajectoryShardReader:
    """Iterates over the records of a set, and reads its blocks by number."""

    def __init__(
        self,
        shards: str | Path | Sequence[str | Path],
        *,
        on_error: Literal["raise", "skip"] = "raise",
        features: bool = True,
        strict: bool = True,
    ) -> None:
        """Opens a set; only side files are read here.

        Args:
            shards: folder of a set, or paths of shards.
            on_error: at damage: ``raise`` a :class:`ShardError`, or ``skip`` what is damaged, with
                a warning, and read every other block.
            features: also read the features members.
            strict: compute every content digest anew. Checksums, the rules of the format and the
                uids of the side file are always checked.

        Raises:
            ShardError: If there is no shard, a shard or side file is missing, or two shards of a
                folder hold one uid (``skip`` warns and leaves the second one out).
        """
        self.on_error = on_error
        self.features = features
        self.strict = strict
        self._sides = self._load_sides(shards)
        self._starts = {
            path: list(accumulate((entry.num_records for entry in side.blocks), initial=0))
            for path, side in self._sides.items()
        }

    @property
    def shards(self) -> list[Path]:
        """All shards of the set, in order."""
        return list(self._sides)

    @property
    def uids(self) -> list[str]:
        """Uids of all records of the set, in order."""
        return [uid for side in self._sides.values() for uid in side.uids]

    @property
    def num_records(self) -> int:
        """Records of the whole set, as its side files count them."""
        return sum(side.num_records for side in self._sides.values())

    @property
    def blocks(self) -> list[tuple[Path, int]]:
        """Shard and number of every block of the set, in order."""
        return [(path, i) for path, side in self._sides.items() for i in range(len(side.blocks))]

    def side_file(self, shard: str | Path) -> SideFile:
        """The side file of a shard of this set."""
        return self._sides[Path(shard)]

    def __iter__(self) -> Iterator[Trajectory]:
        """All records, shard by shard."""
        for path in self._sides:
            yield from self._read_shard(path)

    def read_block(self, shard: str | Path, index: int) -> list[Trajectory]:
        """The records of one block of a shard of this set.

        Raises:
            ShardError: If the block is damaged.
            IndexError: If there is no such block.
        """
        path = Path(shard)
        entry = self._sides[path].blocks[index]
        members = {}
        with path.open("rb") as file:
            for extension, offset, size in (
                ("trajb", entry.offset, entry.size),
                ("featb", entry.feature_offset, entry.feature_size),
            ):
                if offset is not None and size is not None and self._wants(extension):
                    file.seek(offset)
                    # Not what the side file says, which memory would be taken for.
                    left = os.fstat(file.fileno()).st_size - offset
                    members[extension] = file.read(max(min(size, left), 0))
        return self._decode(path, index, members)

    def find(self, uids: Collection[str]) -> Iterator[Trajectory]:
        """The records of some names, in the order of the set; only blocks with one are read."""
        for path, index in self.blocks:
            first, end = self._starts[path][index : index + 2]
            if any(uid in uids for uid in self._sides[path].uids[first:end]):
                yield from (one for one in self.read_block(path, index) if one.uid in uids)

    def outline(self, shard: str | Path, index: int, *, written: bool = False) -> BlockOutline:
        """What can be said about the records of a block from its small columns.

        A features member of 64 records can be 30 MB, of which the numbers of the kept steps are
        2 kB. Header, directory and the small columns are read by offset, each against its checksum;
        neither the features nor, without ``written``, the tokens are read.

        Args:
            shard: a shard of this set.
            index: number of the block in it.
            written: also find the records in which a step wrote a token that stands at the end.

        Raises:
            ShardError: If a column that is read is damaged.
            IndexError: If there is no such block.
        """
        path = Path(shard)
        entry = self._sides[path].blocks[index]
        try:
            with path.open("rb") as file:
                outline = _read_outline(file, entry, features=self.features, written=written)
            self._check_uids(path, index, outline.uids)
        except TrajectoryFormatError as error:
            raise _located(path, entry, error) from error
        return outline

    # -- internals -----------------------------------------------------------------------------

    def _load_sides(self, shards: str | Path | Sequence[str | Path]) -> dict[Path, SideFile]:
        if isinstance(shards, (str, Path)):
            folder = Path(shards)
            if not folder.is_dir():
                raise ShardError(f"{folder}: there is no such folder of shards")
            named = {
                path.with_name(path.name.removesuffix(".json"))
                for path in folder.iterdir()
                if path.name.endswith(".tar.json")
            }
            paths = sorted(named.union(shards_in(folder)))
        else:
            paths = [Path(path) for path in shards]
        sides: dict[Path, SideFile] = {}
        folders: dict[Path, set[str]] = {}
        for path in paths:
            try:
                if not side_path(path).exists():
                    raise ShardError(f"{path}: its side file is missing; recover the folder first")
                side = SideFile.read(side_path(path))
                if not path.exists():
                    raise ShardError(f"{path}: the shard of this side file is missing")
                if len(set(side.uids)) != sum(entry.num_records for entry in side.blocks):
                    raise ShardError(f"{side_path(path)}: its uids and block counts do not fit")
                known = folders.setdefault(path.parent, set())
                if not known.isdisjoint(side.uids):
                    uid = next(uid for uid in side.uids if uid in known)
                    first = next(one.shard for one in sides.values() if uid in one.uids)
                    raise ShardError(doubled(path.parent, uid, first, path.name))
                known.update(side.uids)
                sides[path] = side
            except ShardError as error:
                self._damage(error)
        if not sides:
            raise ShardError(f"{shards}: there are no trajectory shards")
        return sides

    def _read_shard(self, path: Path) -> Iterator[Trajectory]:
        """Records of one shard; everything its side file promises, or an error."""
        # Here: webdataset imports torch, which readers by offset do without.
        from webdataset.tariterators import group_by_keys, tar_file_expander

        side = self._sides[path]
        left = {entry.key: index for index, entry in enumerate(side.blocks)}
        size = path.stat().st_size
        if size != side.bytes:
            self._damage(ShardError(f"{path}: expected {side.bytes} bytes, got {size}"))
        with path.open("rb") as stream:
            samples = group_by_keys(
                tar_file_expander(
                    [{"url": str(path), "stream": stream}],
                    handler=_ends_the_stream,
                    select_files=lambda name: self._wants(name.rpartition(".")[2]),
                ),
                handler=_ends_the_stream,
            )
            for sample in samples:
                index = left.pop(sample["__key__"], None)
                if index is None:
                    self._damage(ShardError(f"{path}: unknown block {sample['__key__']!r}"))
                    continue
                try:
                    records = self._decode(path, index, sample)
                except ShardError as error:
                    self._damage(error)
                    continue
                yield from records
        for index in left.values():  # what the stream did not reach may be whole
            try:
                records = self.read_block(path, index)
            except ShardError as error:
                self._damage(error)
                continue
            yield from records

    def _wants(self, extension: str) -> bool:
        return extension == "trajb" or (self.features and extension == "featb")

    def _damage(self, error: ShardError) -> None:
        if self.on_error == "raise":
            raise error
        logger.warning("skipped: %s", error)

    def _decode(self, path: Path, index: int, members: Mapping[str, bytes]) -> list[Trajectory]:
        try:
            if "trajb" not in members:
                raise ShardError("its records member is missing")
            records = decode_block(members["trajb"], strict=self.strict)
            if self.features and "featb" in members:
                records = attach_features(records, members["featb"])
            elif self.features and read_header(members["trajb"]).flags & FLAG_FEATURES:
                raise ShardError("its features member is missing")
            self._check_uids(path, index, [record.uid for record in records])
        except TrajectoryFormatError as error:
            raise _located(path, self._sides[path].blocks[index], error) from error
        return records

    def _check_uids(self, path: Path, index: int, uids: Sequence[str]) -> None:
        first, end = self._starts[path][index : index + 2]
        if tuple(uids) != self._sides[path].uids[first:end]:
            raise ShardError("its records are not those that the side file names")


def _ends_the_stream(error: Exception) -> bool:
    """Says to webdataset that a damaged archive is no error: its blocks are read by their places.

    Raises:
        Exception: anything else.
    """
    if isinstance(error, tarfile.TarError | EOFError | ValueError):
        return True
    raise error


def _located(path: Path, entry: BlockEntry, error: TrajectoryFormatError) -> ShardError:
    offset = entry.offset + (error.offset or 0)
    return ShardError(
        f"{path}: block {entry.key!r} at byte {offset}: {error}",
        file=path,
        member=entry.key,
        offset=offset,
        record=error.record,
    )


def _read_outline(
    file: BinaryIO, entry: BlockEntry, *, features: bool, written: bool
) -> BlockOutline:
    needed = ("SMID", "NSTP", "PLEN", "GLEN", *(("GTOK",) if written else ()))
    header, columns = read_columns(
        file, entry.offset, entry.size, known=DTYPES, wanted=(*needed, "META", "GIVN")
    )
    n = header.num_records
    missing = [tag for tag in needed if tag not in columns]
    if missing:
        raise InvariantError(f"block: columns {missing} are missing")
    read = ColumnReader(columns, DTYPES)
    lengths = np.stack([read.integers("PLEN", n), read.integers("GLEN", n)], axis=1)
    has_written = None
    if written:
        size = int(lengths[:, 1].sum())
        # Without a given token, whatever is no mask was written.
        cells = read.tokens("GTOK", size) != header.mask_id
        given = read_given(columns.get("GIVN"), size)
        if given is not None:
            cells &= ~given
        record = np.repeat(np.arange(n), lengths[:, 1])
        has_written = np.bincount(record, weights=cells, minlength=n) > 0
    kept = None
    if features and entry.feature_offset is not None and entry.feature_size is not None:
        kept = read_feature_outline(file, entry.feature_offset, entry.feature_size)
        if len(kept.steps) != n:
            raise InvariantError(f"features block: {len(kept.steps)} records, expected {n}")
    return BlockOutline(
        uids=unpack_texts("<H", columns["SMID"], n),
        num_steps=read.integers("NSTP", n),
        lengths=lengths,
        metas=read_metas(columns.get("META"), n),
        has_written=has_written,
        features=kept,
    )
