"""Reads shards block by block, at the offsets in their side files, or in order as a stream.

Training reads by offset: examples are drawn at random, a run resumes at an exact one, and records
are read without the features beside them. A corrupt tar header ends a tar stream without any error,
and flipped bits of the content go unnoticed, so the side file holds the offset of each block and
the CRC32 of its bytes.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, Literal

from lit_dlm.config.files import maker
from lit_dlm.trajectories.format import Block, decode_block, read_block, records_of, refusing
from lit_dlm.trajectories.members import attach_features, decode_members
from lit_dlm.trajectories.record import Trajectory, TrajectoryFormatError, expect
from lit_dlm.trajectories.store.files import (
    FEATURES,
    RECORDS,
    SideFile,
    claim_uids,
    parsed_side_file,
    shards_in,
    side_path,
)

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
            on_error: ``raise``, or ``skip`` what is corrupt, with a warning, and read all other
                blocks.
            features: also read the features members.
            strict: recompute every content digest. Checksums, the rules of the format and the uids
                of the side file are always checked.
        """
        self.on_error = on_error
        self.features = features
        self.strict = strict
        self._sides: dict[Path, SideFile] = {}
        owners: dict[Path, dict[str, str]] = {}
        named = shards_in(Path(shards)) if isinstance(shards, (str, Path)) else map(Path, shards)
        for path in named:
            try:
                side = _side_of(path)
                claim_uids(path.parent, side, owners.setdefault(path.parent, {}))
                self._sides[path] = side
            except TrajectoryFormatError as error:
                self._raise_or_skip(error)
        if not self._sides:  # no call of expect: finding what would make them reads configurations
            raise TrajectoryFormatError(
                f"{shards}: there is no such folder of shards, or no trajectory shards are in it; "
                + maker(Path(str(shards)))
            )
        self._starts = {
            path: list(accumulate((entry.num_records for entry in side.blocks), initial=0))
            for path, side in self._sides.items()
        }

    @property
    def shards(self) -> list[Path]:
        return list(self._sides)

    @property
    def uids(self) -> list[str]:
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
        return self._sides[Path(shard)]

    def __iter__(self) -> Iterator[Trajectory]:
        for path, index in self.blocks:
            # A shard that grew or shrank is reported once, whatever its blocks say.
            if index == 0 and (problem := self._sides[path].size_problem(path)):
                self._raise_or_skip(TrajectoryFormatError(problem))
            try:
                records = self.read_block(path, index)
            except TrajectoryFormatError as error:
                self._raise_or_skip(error)
                continue
            yield from records

    def read_block(self, shard: str | Path, index: int) -> list[Trajectory]:
        return self.outline(shard, index, features=self.features)[1]

    def find(self, uids: Collection[str]) -> Iterator[Trajectory]:
        """Yields the records with these uids, in the order of the set; reads only their blocks."""
        for path, index in self.blocks:
            first, end = self._starts[path][index : index + 2]
            if any(uid in uids for uid in self._sides[path].uids[first:end]):
                yield from (one for one in self.read_block(path, index) if one.uid in uids)

    def _raise_or_skip(self, error: TrajectoryFormatError) -> None:
        if self.on_error == "raise":
            raise error
        logger.warning("skipped: %s", error)

    def outline(
        self, shard: str | Path, index: int, *, features: bool = False
    ) -> tuple[Block, list[Trajectory]]:
        """Reads a block, without its features, which can be 30 MB beside 20 kB of records."""
        path = Path(shard)
        side = self._sides[path]
        entry = side.blocks[index]
        try:
            # Opened for each block: forked loader workers would share an offset, and a set may have
            # more shards than a process may open files.
            with path.open("rb") as file:
                data = _bytes(file, entry.offset, entry.size, entry.crc32)
                block = read_block(data)
                records = records_of(block, strict=self.strict)
                first, end = self._starts[path][index : index + 2]
                # A block that is valid but of another shard passes its own checks.
                own = tuple(record.uid for record in records), block.run_digest.hex()
                is_own = own == (side.uids[first:end], side.run_digest)
                expect(is_own, "its records or run are not those of the side file")
                if features and block.features is not None:
                    place = entry.feature_offset, entry.feature_size, entry.feature_crc32
                    records = attach_features(block, records, _bytes(file, *place))
                return block, records
        except TrajectoryFormatError as error:
            where = f"{path}: block {entry.key!r} at byte {entry.offset}"
            raise TrajectoryFormatError(f"{where}: {error}") from error


def stream(urls: Sequence[str | Path], *, features: bool = True) -> Iterator[Trajectory]:
    """Yields the records of shards in order through WebDataset, which also opens remote URLs.

    Each process, and each worker of a loader, reads shards of its own.
    """
    import webdataset as wds  # imported here, as it imports torch

    # Selected by name, so that features which nobody asked for are skipped in the stream.
    wanted = (RECORDS, FEATURES) if features else (RECORDS,)
    for url in wds.split_by_worker(wds.split_by_node(map(str, urls))):
        with wds.gopen(f"{url}.json") as file:
            entries = parsed_side_file(file.read(), f"{url}.json").blocks
        blocks = wds.WebDataset(
            [url],
            shardshuffle=False,
            nodesplitter=None,  # done above
            workersplitter=None,
            empty_check=False,
            select_files=lambda name: name.endswith(wanted),
        )
        num_blocks = 0
        for members in blocks:
            num_blocks += 1
            with refusing(f"{url}: {members['__key__']}"):
                data = members[RECORDS]
                if features:
                    records = decode_members(data, members.get(FEATURES))[1]
                else:
                    records = decode_block(data)
            yield from records
        # A corrupt header ends a tar stream without an error.
        is_whole = num_blocks == len(entries)
        expect(is_whole, f"{url}: expected {len(entries)} blocks, got {num_blocks}")


def _side_of(shard: Path) -> SideFile:
    for path in (shard, side_path(shard)):
        hint = "a shard needs its side file, recover the folder first"
        expect(path.exists(), f"{path}: is missing; {hint}")
    return SideFile.read(side_path(shard))


def _bytes(file: BinaryIO, offset: int | None, size: int | None, crc32: int | None) -> bytes:
    file.seek(offset or 0)
    # At most what the file holds: read allocates as much memory as it is told to.
    left = os.fstat(file.fileno()).st_size - (offset or 0)
    data = file.read(max(min(size or 0, left), 0))
    is_right = crc32 is not None and zlib.crc32(data) == crc32
    expect(is_right, "its checksum does not match, or a member is missing")
    return data
