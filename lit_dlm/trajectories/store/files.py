"""Names, tar members, side files and atomic writes: everything about files but no policy.

A shard is an uncompressed USTAR file of blocks. Owner, mode and times of its members are fixed, so
equal content gives equal bytes. Beside it lies a JSON file that says what the shard must hold; a
shard counts as finished once that file exists.
"""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO

from lit_dlm.trajectories.errors import TrajectoryFormatError

SIDE_FORMAT, VERSION = "lit-dlm/trajectory-shard", 2
MANIFEST_FILE = "manifest.json"
RUN_MEMBER = "__run__/run.json"
"""Member that carries the run record; names of this kind are skipped by sample readers."""
RECORDS, FEATURES = "records.arrow.zst", "features.arrow.zst"
"""Extensions of a block's members."""
TAR_END = bytes(2 * tarfile.BLOCKSIZE)

_NAME = re.compile(r"[a-z0-9_]+(?:-[a-z0-9_]+)*")
_SHARD = re.compile(
    r"(?P<name>[a-z0-9_-]+)-(?P<split>[a-z0-9_]+)-r(?P<rank>\d{5})(?:-w\d{3})?"  # worker: format 1
    r"-(?P<index>\d{6})\.tar(?P<tail>\.tmp-\d+)?"
)


@dataclass(frozen=True, order=True)
class ShardName:
    """``{name}-{split}-r{rank}-{index}.tar``; two writers never share one."""

    name: str
    split: str
    rank: int
    index: int

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or not re.fullmatch(r"[a-z0-9_]+", self.split):
            raise ValueError(
                "shard name: expected a name of a-z, 0-9, '_' and '-' (no dots) and a split of "
                f"a-z, 0-9 and '_', got {self.name!r} and {self.split!r}"
            )

    def __str__(self) -> str:
        return f"{self.name}-{self.split}-r{self.rank:05d}-{self.index:06d}.tar"

    def key(self, block: int) -> str:
        """Key of a block's members: no dots, since readers cut it at the first one."""
        return f"r{self.rank}s{self.index}b{block:05d}"

    @staticmethod
    def parse(path: Path) -> tuple[ShardName, bool] | None:
        """The name, and whether the file is unfinished (``.tmp-{pid}``); ``None`` for others."""
        match = _SHARD.fullmatch(path.name)
        if match is None:
            return None
        name = ShardName(match["name"], match["split"], int(match["rank"]), int(match["index"]))
        return name, match["tail"] is not None


def next_index(folder: Path, name: ShardName) -> int:
    """The first index that no shard of one name, split and rank uses, finished or not."""
    names = [entry[0] for entry in map(ShardName.parse, folder.iterdir()) if entry]
    used = [one.index for one in names if replace(one, index=name.index) == name]
    return max(used, default=-1) + 1


def tar_member(name: str, data: bytes) -> bytes:
    """Header, content and padding of one tar member."""
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = len(data), 0, 0o644
    padding = -len(data) % tarfile.BLOCKSIZE
    return b"".join([info.tobuf(tarfile.USTAR_FORMAT), data, bytes(padding)])


def scan_members(file: BinaryIO) -> tuple[list[tuple[str, bytes]], bool]:
    """Reads the members of a tar file that may end anywhere.

    Returns:
        Name and content of each whole member up to the end marker, the first damaged header, or
        the point where the file is cut; and whether the end marker was reached.
    """
    members: list[tuple[str, bytes]] = []
    end = os.fstat(file.fileno()).st_size
    while True:
        header = file.read(tarfile.BLOCKSIZE)
        if header == bytes(tarfile.BLOCKSIZE):
            return members, True
        try:
            info = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except tarfile.HeaderError:
            return members, False
        if not 0 <= info.size <= end - file.tell():  # before memory for so much is taken
            return members, False
        data = file.read(info.size)
        file.seek(-info.size % tarfile.BLOCKSIZE, os.SEEK_CUR)
        members.append((info.name, data))


@dataclass(frozen=True, kw_only=True)
class BlockEntry:
    """Where the members of a block lie inside its shard, in bytes, and their CRC32."""

    key: str
    num_records: int
    offset: int
    size: int
    crc32: int
    feature_offset: int | None = None
    feature_size: int | None = None
    feature_crc32: int | None = None


@dataclass(frozen=True, kw_only=True)
class SideFile:
    """What a finished shard must hold."""

    shard: str
    bytes: int
    sha256: str
    run_digest: str
    num_records: int
    blocks: tuple[BlockEntry, ...]
    uids: tuple[str, ...]

    def write(self, folder: Path) -> Path:
        """Writes ``{shard}.json`` atomically."""
        path = folder / f"{self.shard}.json"
        content = {"format": SIDE_FORMAT, "version": VERSION, **asdict(self)}
        write_atomically(path, json.dumps(content, separators=(",", ":")).encode())
        return path

    @staticmethod
    def read(path: Path) -> SideFile:
        """Reads a side file, whoever wrote it."""
        try:
            content = json.loads(path.read_bytes())
            kind, version = content.pop("format"), content.pop("version")
            if (kind, version) == (SIDE_FORMAT, 1):
                raise TrajectoryFormatError(
                    f"{path}: a shard of the older format 1, which this version does not read"
                )
            blocks = tuple(BlockEntry(**entry) for entry in content.pop("blocks"))
            uids = tuple(content.pop("uids"))
            side = SideFile(blocks=blocks, uids=uids, **content)
            if (kind, version) != (SIDE_FORMAT, VERSION):
                raise ValueError(f"expected version {VERSION}, got {version}")
            side._check()
            return side
        except TrajectoryFormatError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise TrajectoryFormatError(f"{path}: not a side file of a shard: {error!r}") from error

    def _check(self) -> None:
        """Sizes that nobody need trust: a reader takes as much memory as they say."""
        numbers: list[int | None] = [self.bytes, self.num_records]
        for entry in self.blocks:
            numbers += [entry.num_records, entry.offset, entry.size, entry.crc32]
            features = (entry.feature_offset, entry.feature_size, entry.feature_crc32)
            numbers += features if features != (None, None, None) else ()
        if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
            raise ValueError("expected sizes and places that are whole numbers of 63 bits")
        if any(
            entry.offset + entry.size > self.bytes
            or (entry.feature_offset or 0) + (entry.feature_size or 0) > self.bytes
            for entry in self.blocks
        ):
            raise ValueError(f"a block ends behind the {self.bytes} bytes of the shard")
        texts = [self.shard, self.sha256, self.run_digest, *self.uids]
        if not all(type(text) is str for text in (*texts, *(entry.key for entry in self.blocks))):
            raise ValueError("expected names and digests that are texts")


def side_path(shard: Path) -> Path:
    """The side file of a shard."""
    return shard.with_name(shard.name + ".json")


def shards_in(folder: Path) -> list[Path]:
    """Shards of a folder that have their final name, sorted."""
    return sorted(path for path in folder.glob("*.tar") if ShardName.parse(path) is not None)


def shard_paths(paths: Sequence[Path]) -> list[Path]:
    """Shards that paths name; a folder stands for all of its shards."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = shards_in(path)
            if not inside:
                raise ValueError(f"{path}: there are no trajectory shards in this folder")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise ValueError(f"{path}: there is no such shard or folder")
    return list(dict.fromkeys(found))


def side_files(folder: Path) -> list[SideFile]:
    """All side files of a folder, in the order of their shards."""
    return [SideFile.read(path) for path in sorted(folder.glob("*.tar.json"))]


def completed_uids(folder: str | Path) -> set[str]:
    """Uids of all finished shards of a folder; empty when there is no such folder."""
    folder = Path(folder)
    return {uid for side in side_files(folder) for uid in side.uids} if folder.is_dir() else set()


def claim_uids(folder: Path, side: SideFile, owners: dict[str, str]) -> None:
    """Notes which shard of a folder holds which uid; two of them may not hold the same."""
    twice = next((uid for uid in side.uids if uid in owners), None)
    if twice is not None:
        raise TrajectoryFormatError(
            f"uid {twice!r} is in both {owners[twice]} and {side.shard}: two processes wrote to "
            f"{folder}; `lit-dlm traj recover {folder}` takes the second ones out"
        )
    owners.update(dict.fromkeys(side.uids, side.shard))


def uid_order(uids: Sequence[str]) -> list[int]:
    """Numbers of records in an order that does not depend on which process wrote them when.

    Args:
        uids: names ``{task}/{split}/{problem}@{method}`` of the records, in any order.

    Returns:
        The records sorted by uid within each set of problems and method; these come in the order of
        their first records, which is that of the run.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for number, uid in enumerate(uids):
        prompt = uid.rpartition("@")[0] or uid
        groups.setdefault((prompt.rpartition("/")[0], uid[len(prompt) :]), []).append(number)
    return [
        number
        for (_, method), numbers in groups.items()
        for number in sorted(numbers, key=lambda number: uids[number].removesuffix(method))
    ]


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a small file so that readers see all of it or nothing, and a crash keeps it."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync_folder(folder: Path) -> None:
    """Makes renames inside a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
