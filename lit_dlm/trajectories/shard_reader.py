"""Reads shards through webdataset, and does not take the end of a stream at its word.

A damaged tar header ends a tar stream without any error, and flipped payload bits pass through it.
So every block is checked by the codec, and at the end of each shard what came out is compared with
what the side file says the shard must hold.

Readers split the work by numbers that they are given, never by environment variables, so that a
spawned loader worker cannot mistake itself for the only one.
"""

from __future__ import annotations

import logging
import os
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

# Before the import: webdataset then refuses to unpickle members.
os.environ.setdefault("WDS_SECURE", "1")

import webdataset as wds
from torch.utils.data import get_worker_info
from webdataset.tariterators import group_by_keys, tar_file_expander

from lit_dlm.trajectories.codec import FLAG_FEATURES, decode_block
from lit_dlm.trajectories.container import read_header
from lit_dlm.trajectories.errors import ShardError, TrajectoryFormatError
from lit_dlm.trajectories.feature_codec import attach_features
from lit_dlm.trajectories.outline import BlockOutline, read_outline
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.shard_files import BlockEntry, SideFile, shards_in, side_path

logger = logging.getLogger(__name__)

OnError = Literal["raise", "skip", "stop"]


class TrajectoryShardReader:
    """Iterates over the records of a set, or of one reader's part of it."""

    def __init__(
        self,
        shards: str | Path | Sequence[str | Path],
        *,
        on_error: OnError = "raise",
        rank: int = 0,
        world_size: int = 1,
        worker: int | None = None,
        num_workers: int | None = None,
        split_by: Literal["shard", "block"] = "shard",
        features: bool = True,
        strict: bool = True,
        max_bad_fraction: float = 0.001,
        dictionaries: Mapping[int, bytes] | None = None,
    ) -> None:
        """Opens a set; only side files are read here.

        Args:
            shards: folder of a set, or paths of shards.
            on_error: at damage: ``raise`` a :class:`ShardError`; ``skip`` what is damaged, with a
                warning, and read every other block, as long as ``max_bad_fraction`` allows;
                ``stop`` the iteration, with a warning.
            rank: number of this process among ``world_size``.
            world_size: processes that share the set.
            worker: number of this loader worker among ``num_workers``; by default what torch's
                loader says about the process that iterates.
            num_workers: loader workers per process.
            split_by: ``shard`` deals out whole shards, read as streams; ``block`` deals out blocks,
                which is even with few shards, read by offset.
            features: also read the features members.
            strict: compute every content digest anew. Checksums, the rules of the format and the
                uids of the side file are always checked.
            max_bad_fraction: share of the set's records that ``skip`` may lose in this reader
                before it raises after all.
            dictionaries: zstd dictionaries by id, for blocks that need one.

        Raises:
            ShardError: If there is no shard, or a shard or side file is missing (``skip`` warns).
            ValueError: If a number is out of range or a setting is unknown.
        """
        if on_error not in ("raise", "skip", "stop"):
            raise ValueError(f"on_error: expected 'raise', 'skip' or 'stop', got {on_error!r}")
        if split_by not in ("shard", "block"):
            raise ValueError(f"split_by: expected 'shard' or 'block', got {split_by!r}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank: expected 0..{world_size - 1}, got {rank}")
        if (worker is None) != (num_workers is None) or (
            worker is not None and num_workers is not None and not 0 <= worker < num_workers
        ):
            raise ValueError(f"worker: expected 0..num_workers - 1, got {worker} of {num_workers}")
        if not 0.0 <= max_bad_fraction <= 1.0:
            raise ValueError(f"max_bad_fraction: expected 0..1, got {max_bad_fraction}")
        self.on_error = on_error
        self.rank, self.world_size = rank, world_size
        self.worker, self.num_workers = worker, num_workers
        self.split_by = split_by
        self.features = features
        self.strict = strict
        self.max_bad_fraction = max_bad_fraction
        self.dictionaries = dictionaries
        self.num_damaged_blocks = 0
        """Blocks lost to damage so far (only with ``skip`` and ``stop``)."""
        self.num_lost_records = 0
        """Records of these blocks and of missing shards."""
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
        """Records of this reader's part, shard by shard."""
        part, parts = self._part()
        if self.split_by == "block":
            return self._guarded(self._dealt_blocks(part, parts))
        shards = self.shards[part::parts]
        if parts > len(self._sides):
            logger.warning("%d shards for %d readers: some read nothing", len(self._sides), parts)
        if not shards:
            return iter(())
        source = wds.SimpleShardList([str(path) for path in shards])
        return self._guarded(iter(wds.DataPipeline(source, self._read_shards)))

    def read_block(self, shard: str | Path, index: int) -> list[Trajectory]:
        """Random access to one block.

        Args:
            shard: a shard of this set.
            index: number of the block in it.

        Returns:
            Its records.

        Raises:
            ShardError: If the block is damaged.
            IndexError: If there is no such block.
        """
        path = Path(shard)
        side = self._sides[path]
        entry = side.blocks[index]
        members = {}
        with path.open("rb") as file:
            for extension, offset, size in (
                ("trajb", entry.offset, entry.size),
                ("featb", entry.feature_offset, entry.feature_size),
            ):
                if offset is not None and size is not None and self._wants(extension):
                    file.seek(offset)
                    members[extension] = file.read(size)
        return self._decode(path, side, index, members)

    def outline(self, shard: str | Path, index: int, *, written: bool = False) -> BlockOutline:
        """What can be said about the records of a block from its small columns.

        Neither the features nor, without ``written``, the tokens are read.

        Args:
            shard: a shard of this set.
            index: number of the block in it.
            written: also find the records in which a step wrote a token that stands at the end.

        Returns:
            The outline; with its kept steps if this reader reads features.

        Raises:
            ShardError: If a column that is read is damaged.
            IndexError: If there is no such block.
        """
        path = Path(shard)
        side = self._sides[path]
        entry = side.blocks[index]
        try:
            with path.open("rb") as file:
                outline = read_outline(
                    file,
                    entry,
                    features=self.features,
                    written=written,
                    dictionaries=self.dictionaries,
                )
            self._check_uids(path, index, outline.uids)
        except TrajectoryFormatError as error:
            raise self._located(path, entry, error) from error
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
        sides = {}
        missing = 0
        for path in paths:
            try:
                if not side_path(path).exists():
                    raise ShardError(f"{path}: its side file is missing; recover the folder first")
                side = SideFile.read(side_path(path))
                if not path.exists():
                    missing += side.num_records
                    raise ShardError(f"{path}: the shard of this side file is missing")
                if len(set(side.uids)) != sum(entry.num_records for entry in side.blocks):
                    raise ShardError(f"{side_path(path)}: its uids and block counts do not fit")
                sides[path] = side
            except ShardError as error:
                if self.on_error == "raise":
                    raise
                logger.warning("skipped: %s", error)
        if not sides:
            raise ShardError(f"{shards}: there are no trajectory shards")
        self.num_lost_records = missing
        self._num_expected = missing + sum(side.num_records for side in sides.values())
        if self.on_error == "skip":
            self._check_losses(None)
        return sides

    def _part(self) -> tuple[int, int]:
        """This reader's number and the number of readers."""
        worker, num_workers = self.worker, self.num_workers
        if worker is None or num_workers is None:
            info = get_worker_info()
            worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        return self.rank * num_workers + worker, self.world_size * num_workers

    def _guarded(self, records: Iterator[Trajectory]) -> Iterator[Trajectory]:
        try:
            yield from records
        except _Stop:
            return

    def _dealt_blocks(self, part: int, parts: int) -> Iterator[Trajectory]:
        number = 0
        for path, side in self._sides.items():
            for index in range(len(side.blocks)):
                if number % parts == part:
                    yield from self._tolerant_block(path, index)
                number += 1

    def _read_shards(self, sources: Iterable[Mapping[str, Any]]) -> Iterator[Trajectory]:
        for source in sources:
            yield from self._read_shard(Path(source["url"]))

    def _read_shard(self, path: Path) -> Iterator[Trajectory]:
        """Records of one shard; everything its side file promises, or an error."""
        side = self._sides[path]
        left = {entry.key: index for index, entry in enumerate(side.blocks)}
        size = path.stat().st_size
        if size != side.bytes:
            cut = ShardError(f"{path}: expected {side.bytes} bytes, got {size}")
            if self.on_error == "raise":
                raise cut
            logger.warning("%s", cut)
        try:
            with path.open("rb") as stream:
                for sample in self._samples(path, stream):
                    index = left.pop(sample["__key__"], None)
                    if index is None:
                        self._damage(
                            ShardError(f"{path}: unknown block {sample['__key__']!r}"), num_lost=0
                        )
                        continue
                    try:
                        records = self._decode(path, side, index, sample)
                    except ShardError as error:
                        self._damage(error, num_lost=side.blocks[index].num_records)
                        continue
                    yield from records
        except (tarfile.TarError, ValueError, EOFError) as error:
            if isinstance(error, ShardError):
                raise
            cause = ShardError(f"{path}: the archive is damaged: {error}")
            if self.on_error == "raise":
                raise cause from error
            logger.warning("%s", cause)
        if left:
            missing = ShardError(
                f"{path}: expected {len(side.blocks)} blocks, got {len(side.blocks) - len(left)}; "
                f"the stream ended before {next(iter(left))!r} (a damaged header or a cut file)"
            )
            if self.on_error != "skip":
                lost = sum(side.blocks[index].num_records for index in left.values())
                self._damage(missing, num_lost=lost)
            logger.warning("%s; reading the others by offset", missing)
            for index in left.values():
                yield from self._tolerant_block(path, index)

    def _samples(self, path: Path, stream: Any) -> Iterator[dict[str, Any]]:
        files = tar_file_expander([{"url": str(path), "stream": stream}], select_files=self._select)
        samples: Iterator[dict[str, Any]] = group_by_keys(files)
        return samples

    def _select(self, name: str) -> bool:
        return self._wants(name.rpartition(".")[2])

    def _wants(self, extension: str) -> bool:
        return extension == "trajb" or (self.features and extension == "featb")

    def _tolerant_block(self, path: Path, index: int) -> list[Trajectory]:
        try:
            return self.read_block(path, index)
        except ShardError as error:
            self._damage(error, num_lost=self._sides[path].blocks[index].num_records)
            return []

    def _damage(self, error: ShardError, *, num_lost: int) -> None:
        if self.on_error == "raise":
            raise error
        self.num_damaged_blocks += 1
        self.num_lost_records += num_lost
        logger.warning("%s: %s", "skipped" if self.on_error == "skip" else "stopped", error)
        if self.on_error == "stop":
            raise _Stop
        self._check_losses(error)

    def _check_losses(self, cause: ShardError | None) -> None:
        allowed = self.max_bad_fraction * self._num_expected
        if self.num_lost_records > allowed:
            raise ShardError(
                f"{self.num_lost_records} of {self._num_expected} records are lost to damage, "
                f"more than max_bad_fraction {self.max_bad_fraction} allows"
            ) from cause

    def _decode(
        self, path: Path, side: SideFile, index: int, members: Mapping[str, bytes]
    ) -> list[Trajectory]:
        entry = side.blocks[index]
        try:
            if "trajb" not in members:
                raise ShardError("its records member is missing")
            block = members["trajb"]
            records = decode_block(block, strict=self.strict, dictionaries=self.dictionaries)
            if self.features and "featb" in members:
                records = attach_features(records, members["featb"])
            elif self.features and read_header(block).flags & FLAG_FEATURES:
                raise ShardError("its features member is missing")
            self._check_uids(path, index, [record.uid for record in records])
        except TrajectoryFormatError as error:
            raise self._located(path, entry, error) from error
        return records

    def _check_uids(self, path: Path, index: int, uids: Sequence[str]) -> None:
        first, end = self._starts[path][index : index + 2]
        if tuple(uids) != self._sides[path].uids[first:end]:
            raise ShardError("its records are not those that the side file names")

    @staticmethod
    def _located(path: Path, entry: BlockEntry, error: TrajectoryFormatError) -> ShardError:
        offset = entry.offset + (error.offset or 0)
        return ShardError(
            f"{path}: block {entry.key!r} at byte {offset}: {error}",
            file=path,
            member=entry.key,
            offset=offset,
            record=error.record,
        )


class _Stop(Exception):  # noqa: N818  (control flow, not an error)
    """Ends the iteration at damage."""
