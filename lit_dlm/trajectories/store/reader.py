"""Reads shards block by block, at the places that their side files name.

A damaged tar header ends a tar stream without any error, and flipped payload bits pass through it.
So the side file says where each block lies and what its bytes give (CRC32).
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, Literal

from lit_dlm.trajectories.errors import TrajectoryFormatError
from lit_dlm.trajectories.features import attach_features
from lit_dlm.trajectories.format import Block, read_block, records_of
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.store.files import SideFile, claim_uids, shards_in, side_path

logger = logging.getLogger(__name__)


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
            on_error: at damage: ``raise``, or ``skip`` what is damaged, with a warning, and read
                every other block.
            features: also read the features members.
            strict: compute every content digest anew. Checksums, the rules of the format and the
                uids of the side file are always checked.
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
        for path, side in self._sides.items():
            size = path.stat().st_size
            if size != side.bytes:
                self._damage(
                    TrajectoryFormatError(f"{path}: expected {side.bytes} bytes, got {size}")
                )
            for index in range(len(side.blocks)):
                try:
                    records = self.read_block(path, index)
                except TrajectoryFormatError as error:
                    self._damage(error)
                    continue
                yield from records

    def read_block(self, shard: str | Path, index: int) -> list[Trajectory]:
        """The records of one block of a shard of this set."""
        path = Path(shard)
        entry = self._sides[path].blocks[index]
        with path.open("rb") as file:
            try:
                block, records = self._records(file, path, index)
                if not self.features or block.features is None:
                    return records
                if entry.feature_offset is None:
                    raise TrajectoryFormatError("its features member is missing")
                data = _bytes(file, entry.feature_offset, entry.feature_size, entry.feature_crc32)
                return attach_features(block, records, data)
            except TrajectoryFormatError as error:
                raise self._located(path, index, error) from error

    def outline(self, shard: str | Path, index: int) -> tuple[Block, list[Trajectory]]:
        """A block without its features, which can be 30 MB beside 20 kB of records."""
        path = Path(shard)
        with path.open("rb") as file:
            try:
                return self._records(file, path, index)
            except TrajectoryFormatError as error:
                raise self._located(path, index, error) from error

    def find(self, uids: Collection[str]) -> Iterator[Trajectory]:
        """The records of some names, in the order of the set; only blocks with one are read."""
        for path, index in self.blocks:
            first, end = self._starts[path][index : index + 2]
            if any(uid in uids for uid in self._sides[path].uids[first:end]):
                yield from (one for one in self.read_block(path, index) if one.uid in uids)

    # -- internals -----------------------------------------------------------------------------

    def _load_sides(self, shards: str | Path | Sequence[str | Path]) -> dict[Path, SideFile]:
        if isinstance(shards, (str, Path)):
            folder = Path(shards)
            if not folder.is_dir():
                raise TrajectoryFormatError(f"{folder}: there is no such folder of shards")
            named = {path.with_suffix("") for path in folder.glob("*.tar.json")}
            paths = sorted(named.union(shards_in(folder)))
        else:
            paths = [Path(path) for path in shards]
        sides: dict[Path, SideFile] = {}
        owners: dict[Path, dict[str, str]] = {}
        for path in paths:
            try:
                side = self._load_side(path)
                claim_uids(path.parent, side, owners.setdefault(path.parent, {}))
                sides[path] = side
            except TrajectoryFormatError as error:
                self._damage(error)
        if not sides:
            raise TrajectoryFormatError(f"{shards}: there are no trajectory shards")
        return sides

    @staticmethod
    def _load_side(path: Path) -> SideFile:
        if not side_path(path).exists():
            raise TrajectoryFormatError(
                f"{path}: its side file is missing; recover the folder first"
            )
        side = SideFile.read(side_path(path))
        if not path.exists():
            raise TrajectoryFormatError(f"{path}: the shard of this side file is missing")
        if len(set(side.uids)) != sum(entry.num_records for entry in side.blocks):
            raise TrajectoryFormatError(f"{side_path(path)}: its uids and block counts do not fit")
        return side

    def _damage(self, error: TrajectoryFormatError) -> None:
        if self.on_error == "raise":
            raise error
        logger.warning("skipped: %s", error)

    def _located(self, path: Path, index: int, error: Exception) -> TrajectoryFormatError:
        entry = self._sides[path].blocks[index]
        return TrajectoryFormatError(f"{path}: block {entry.key!r} at byte {entry.offset}: {error}")

    def _records(self, file: BinaryIO, path: Path, index: int) -> tuple[Block, list[Trajectory]]:
        side = self._sides[path]
        entry = side.blocks[index]
        block = read_block(_bytes(file, entry.offset, entry.size, entry.crc32))
        records = records_of(block, strict=self.strict)
        first, end = self._starts[path][index : index + 2]
        if tuple(record.uid for record in records) != side.uids[first:end]:
            raise TrajectoryFormatError("its records are not those that the side file names")
        if block.run_digest.hex() != side.run_digest:
            raise TrajectoryFormatError(f"it names another run, {block.run_digest.hex()}")
        return block, records


def _bytes(file: BinaryIO, offset: int, size: int | None, crc32: int | None) -> bytes:
    file.seek(offset)
    # Not what the side file says, which memory would be taken for.
    left = os.fstat(file.fileno()).st_size - offset
    data = file.read(max(min(size or 0, left), 0))
    if zlib.crc32(data) != crc32:
        raise TrajectoryFormatError("its checksum does not match")
    return data
