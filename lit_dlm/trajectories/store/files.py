"""Names, tar members and side files of shards; when to write or merge them is decided elsewhere.

A shard is an uncompressed USTAR file of blocks that WebDataset can read. A JSON file beside it says
what the shard must hold; a shard counts as finished once that file exists.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pyarrow as pa

from lit_dlm.system.files import write_atomically
from lit_dlm.trajectories.record import TrajectoryFormatError, expect

SIDE_FORMAT, VERSION = "lit-dlm/trajectory-shard", 2
MANIFEST_FILE = "manifest.json"
RUN_KEY = "__run__/run"
RUN_MEMBER = f"{RUN_KEY}.json"
"""Member that carries the run record; names of this kind are skipped by sample readers."""
RECORDS, FEATURES = "records.arrow.zst", "features.arrow.zst"
"""Extensions of a block's members."""
TAR_END = bytes(2 * tarfile.BLOCKSIZE)

STRANGE = (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError)
"""Exceptions that JSON of an unexpected shape may raise."""

_NAME = re.compile(r"[a-z0-9_]+(?:-[a-z0-9_]+)*")
# Format 1 had a worker in the name; such a shard is found, so that it can be refused by name.
_SHARD = re.compile(
    r"(?P<name>[a-z0-9_-]+)-(?P<split>[a-z0-9_]+)-r(?P<rank>\d{5})(?:-w\d{3})?"
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
        """Key of a block's members, without dots, since readers cut names at the first one."""
        return f"r{self.rank}s{self.index}b{block:05d}"

    @staticmethod
    def parse(path: Path) -> tuple[ShardName, bool] | None:
        """The name, and whether it is unfinished (``.tmp-{pid}``); ``None`` for other files."""
        match = _SHARD.fullmatch(path.name)
        if match is None:
            return None
        name = ShardName(match["name"], match["split"], int(match["rank"]), int(match["index"]))
        return name, match["tail"] is not None

    def next_in(self, folder: Path) -> ShardName:
        """The name after the last one of this series in a folder."""
        # Unfinished ones count too: they take their final name later.
        names = [entry[0] for entry in map(ShardName.parse, folder.iterdir()) if entry]
        used = [one.index for one in names if replace(one, index=self.index) == self]
        return replace(self, index=max(used, default=-1) + 1)


def member_bytes(data: bytes) -> int:
    """Bytes that a member takes in a tar: header, content and padding."""
    return tarfile.BLOCKSIZE + len(data) + -len(data) % tarfile.BLOCKSIZE


def tar_members(key: str, members: Mapping[str, bytes]) -> memoryview:
    """Members ``{key}.{name}`` as WebDataset writes them, sorted by name."""
    from webdataset import TarWriter  # imported here, as it imports torch

    file = io.BytesIO()
    # Fixed owner, time and mode: equal content gives equal bytes.
    with TarWriter(file, encoder=False, mtime=0, user="", group="", mode=0o644) as archive:
        archive.write({"__key__": key, **members})
    # Without the archive's end: a stream that ended here could not take up the next block, and
    # TarWriter itself cannot take back half a block after an error of the disk.
    return file.getbuffer()[: sum(map(member_bytes, members.values()))]


def archived_blocks(shard: Path) -> tuple[dict[str, dict[str, bytes]], bool]:
    """Returns what WebDataset finds in a shard that may be cut off anywhere, or corrupt.

    Returns:
        Members of the run and of each block by extension, up to the first corrupt header or the
        point where the file is cut; and whether that is all that the file holds.
    """
    from webdataset.tariterators import tar_file_iterator  # imported here, as it imports torch

    blocks: dict[str, dict[str, bytes]] = {}
    size = len(TAR_END)
    with shard.open("rb") as file:
        try:
            for member in tar_file_iterator(file, skip_meta=None):
                size += member_bytes(member["data"])
                key, _, extension = member["fname"].partition(".")
                blocks.setdefault(key, {})[extension] = member["data"]
        except (tarfile.TarError, EOFError, ValueError, OSError):
            return blocks, False
    # A corrupt header ends a tar without an error; only the size tells.
    return blocks, size == shard.stat().st_size


_ENTRY = pa.struct(
    [
        *(("key", pa.string()), ("num_records", pa.uint32()), ("crc32", pa.uint32())),
        *((name, pa.uint64()) for name in ("offset", "size")),
        *((f"feature_{name}", pa.uint64()) for name in ("offset", "size", "crc32")),
    ]
)
_SIDE = pa.struct(
    [
        *((name, pa.string()) for name in ("shard", "sha256", "run_digest")),
        *((name, pa.int64()) for name in ("bytes", "num_records")),
        *(("blocks", pa.list_(_ENTRY)), ("uids", pa.list_(pa.string()))),
    ]
)


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

    def write(self, folder: Path) -> None:
        content = {"format": SIDE_FORMAT, "version": VERSION, **asdict(self)}
        text = json.dumps(content, separators=(",", ":"))
        write_atomically(folder / f"{self.shard}.json", text)

    @staticmethod
    def read(path: Path) -> SideFile:
        return parsed_side_file(path.read_bytes(), path)

    def size_problem(self, shard: Path) -> str:
        """What is wrong with the size of the shard; empty if nothing is."""
        size = shard.stat().st_size if shard.exists() else None
        return "" if size == self.bytes else f"{shard}: expected {self.bytes} bytes, got {size}"


def parsed_side_file(text: bytes, where: object) -> SideFile:
    """Checks the text of a side file, whoever wrote it."""
    try:
        content = json.loads(text)
        version = content["format"], content["version"]
        old = "of the older format 1" if version == (SIDE_FORMAT, 1) else f"of {version}"
        known = version == (SIDE_FORMAT, VERSION)
        expect(known, f"a shard {old}, which this version does not read")
        # Arrow refuses other types, but cuts fractions off.
        (row,) = pa.array([content], _SIDE).to_pylist()
        is_exact = row == {name: content[name] for name in row}
        blocks = tuple(BlockEntry(**entry) for entry in row.pop("blocks"))
        side = SideFile(blocks=blocks, uids=tuple(row.pop("uids")), **row)
        # Offsets and sizes are not trusted: a reader would allocate as much as they say.
        ends = [0, *(entry.offset + entry.size for entry in blocks)]
        ends += [(entry.feature_offset or 0) + (entry.feature_size or 0) for entry in blocks]
        # Three ways to count the records; a uid twice would be read twice in every epoch.
        counts = {sum(entry.num_records for entry in blocks), side.num_records}
        counts.add(len(set(side.uids) - {None}))
        expect(
            is_exact and max(ends) <= side.bytes and len(counts) == 1,
            f"its values do not fit: numbers of records {sorted(counts)}, a block up to "
            f"byte {max(ends)} of {side.bytes}",
        )
        return side
    except (pa.ArrowException, *STRANGE) as error:
        raise TrajectoryFormatError(f"{where}: not a side file of a shard: {error}") from error


def side_path(shard: Path) -> Path:
    """Returns the path of a shard's side file."""
    return shard.with_name(shard.name + ".json")


def shards_in(folder: Path) -> list[Path]:
    """Shards of a folder that have their final name, sorted; a side file names one that is gone."""
    named = {path for path in folder.glob("*.tar") if ShardName.parse(path) is not None}
    return sorted(named.union(path.with_suffix("") for path in folder.glob("*.tar.json")))


def shard_paths(paths: Sequence[Path]) -> list[Path]:
    """Returns the shards that paths name; a folder names all of its shards."""
    named: list[Path] = []
    for path in paths:
        shards = [path] if path.is_file() else shards_in(path)
        if not shards:
            below = sorted({shard.parent.name for shard in path.glob("*/*.tar")})
            hint = f"; there are some in its {' and '.join(below)}" if below else ""
            raise ValueError(f"{path}: there is no such shard or folder with shards{hint}")
        named += shards
    return list(dict.fromkeys(named))


def side_files(folder: Path) -> list[SideFile]:
    """All side files of a folder, in the order of their shards."""
    return [SideFile.read(path) for path in sorted(folder.glob("*.tar.json"))]


def completed_uids(folder: str | Path) -> set[str]:
    """Uids of all finished shards of a folder; empty when there is no such folder."""
    return {uid for side in side_files(Path(folder)) for uid in side.uids}


def claim_uids(folder: Path, side: SideFile, owners: dict[str, str]) -> None:
    """Notes in ``owners`` which shard holds which uid; the same uid in two shards is an error."""
    twice = next((uid for uid in side.uids if uid in owners), None)
    expect(
        twice is None,
        f"uid {twice!r} is in both {owners.get(twice or '')} and {side.shard}: two processes wrote "
        f"to {folder}; `lit-dlm traj recover {folder}` takes the second ones out",
    )
    owners.update(dict.fromkeys(side.uids, side.shard))


def prompt_uid(uid: str) -> str:
    """Uid of a decode's prompt: without ``#{number}`` of the response and ``@{method}``."""
    return re.sub(r"(#\d+)?(@[^@]*)?\Z", "", uid)


def uid_order(uids: Sequence[str]) -> list[int]:
    """Returns indices of records in an order that is independent of which process wrote them when.

    Records are sorted by uid, ``{task}/{split}/{problem}@{method}`` (of rollouts, with
    ``/{rollout}`` behind it), within groups of one ``{task}/{split}`` and method; groups are in the
    order of their first records, as in the run.
    """
    # Which process decodes a prompt, and when, may differ; what is trained on must not.
    groups: dict[tuple[str, str], list[tuple[str, str, int]]] = {}
    for number, uid in enumerate(uids):
        prompt = uid.rpartition("@")[0] or uid
        method, _, rollout = uid[len(prompt) :].partition("/")
        group = groups.setdefault((prompt.rpartition("/")[0], method), [])
        group.append((prompt, rollout, number))
    return [number for group in groups.values() for *_, number in sorted(group)]
