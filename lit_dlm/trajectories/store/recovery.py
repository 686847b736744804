"""What a folder of shards holds, and how to save what a killed process left in it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from lit_dlm.trajectories.errors import TrajectoryFormatError
from lit_dlm.trajectories.features import attach_features
from lit_dlm.trajectories.format import read_block, records_of
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.store.files import (
    FEATURES,
    MANIFEST_FILE,
    RECORDS,
    RUN_MEMBER,
    VERSION,
    ShardName,
    claim_uids,
    completed_uids,
    next_index,
    scan_members,
    shards_in,
    side_files,
    side_path,
    write_atomically,
)
from lit_dlm.trajectories.store.writer import OPEN_FILES, ShardFile, encoded, lives, lock

logger = logging.getLogger(__name__)

MANIFEST_FORMAT = "lit-dlm/trajectory-manifest"


@dataclass(frozen=True)
class Recovered:
    """What :func:`recover` did with one file."""

    path: Path  # The orphan; it is gone (or has .damaged appended)
    shard: Path | None  # The shard that now holds its records; None when it had no new one
    num_records: int
    num_dropped_blocks: int  # Blocks that were cut, damaged, or lacked their features


def recover(folder: str | Path) -> list[Recovered]:
    """Saves the whole blocks of unfinished shards whose process is dead.

    Each such file is read as far as it goes; blocks that pass every check go into a new shard of
    the same series, records that a finished shard already holds are left out, and the file is
    deleted. A finished shard without side file (a crash between the two) is treated the same way,
    but kept as ``.damaged`` if anything in it was lost. Of records that two finished shards hold,
    as two processes in one folder left them, the second ones are taken out. Run it before a folder
    is resumed, by one process, while no other starts to write there; running it again changes
    nothing.

    Returns:
        One entry per orphan; none for a folder that does not exist.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return []
    done = completed_uids(folder)
    reports = []
    for path in sorted(folder.iterdir()):
        parsed = ShardName.parse(path)
        if parsed is None or path in OPEN_FILES:
            if ".json.tmp-" in path.name and not _process_lives(path):
                path.unlink(missing_ok=True)  # a side file or manifest that was being written
            continue
        name, is_unfinished = parsed
        if not is_unfinished and side_path(path).exists():
            continue
        report = _recover_file(folder, path, name, done, is_unfinished=is_unfinished)
        if report is not None:
            logger.warning(
                "%s: recovered %d records, dropped %d blocks",
                path,
                report.num_records,
                report.num_dropped_blocks,
            )
            reports.append(report)
    return reports + _without_doubles(folder)


def _without_doubles(folder: Path) -> list[Recovered]:
    """Writes shards that repeat records of earlier ones anew, without these."""
    seen: set[str] = set()
    reports = []
    for side in side_files(folder):
        if seen.isdisjoint(side.uids):
            seen.update(side.uids)
            continue
        path = folder / side.shard
        parsed = ShardName.parse(path)
        if parsed is None or not path.exists():
            continue
        (folder / MANIFEST_FILE).unlink(missing_ok=True)
        # Should the process die now, the shard without side file is recovered in the same way.
        side_path(path).unlink()
        report = _recover_file(folder, path, parsed[0], seen, is_unfinished=False)
        if report is not None:
            logger.warning(
                "%s: held %d records that other shards hold, too; they are out",
                path,
                side.num_records - report.num_records,
            )
            reports.append(report)
    return reports


def drop_shards(folder: str | Path, is_stale: Callable[[str], bool]) -> int:
    """Deletes the finished shards of records that are to be written anew; returns their number.

    One process does so, after :func:`recover` and while no other writes there. The manifest goes,
    too, until the folder is merged again. A shard that holds such records and others is an error.
    """
    folder = Path(folder)
    stale = [side for side in side_files(folder) if any(map(is_stale, side.uids))]
    for side in stale:
        kept = [uid for uid in side.uids if not is_stale(uid)]
        if kept:
            raise TrajectoryFormatError(
                f"{folder / side.shard}: expected records that are all to be replaced or all to "
                f"be kept, got {len(kept)} to keep ({kept[0]!r}) of {side.num_records}"
            )
    for side in stale:
        (folder / MANIFEST_FILE).unlink(missing_ok=True)
        # In this order: should the process die in between, a shard alone is recovered.
        side_path(folder / side.shard).unlink()
        (folder / side.shard).unlink()
    return sum(side.num_records for side in stale)


def merge_manifest(folder: str | Path) -> dict[str, Any]:
    """Merges all side files of a folder into ``manifest.json``; can be repeated at any time."""
    folder = Path(folder)
    sides = side_files(folder)
    named = {side.shard for side in sides}
    alone = [path.name for path in shards_in(folder) if path.name not in named]
    if alone:
        raise TrajectoryFormatError(
            f"{folder}: shards without side file: {alone}; recover the folder first"
        )
    owners: dict[str, str] = {}
    for side in sides:
        path = folder / side.shard
        size = path.stat().st_size if path.exists() else None
        if size != side.bytes:
            raise TrajectoryFormatError(f"{path}: expected {side.bytes} bytes, got {size}")
        claim_uids(folder, side, owners)
    manifest = {
        "format": MANIFEST_FORMAT,
        "version": VERSION,
        "num_records": sum(side.num_records for side in sides),
        "num_blocks": sum(len(side.blocks) for side in sides),
        "bytes": sum(side.bytes for side in sides),
        "run_digests": sorted({side.run_digest for side in sides}),
        "shards": [
            {name: getattr(side, name) for name in ("shard", "bytes", "sha256", "num_records")}
            for side in sides
        ],
    }
    write_atomically(folder / MANIFEST_FILE, json.dumps(manifest, indent=1).encode())
    return manifest


@dataclass
class _Salvage:
    """What a file that may end anywhere still holds."""

    run_text: str | None
    run_digest: bytes
    blocks: list[tuple[list[Trajectory], bytes, bytes | None]]
    num_dropped: int
    is_whole: bool


def _process_lives(path: Path) -> bool:
    """Whether this machine runs the process whose id ends the name ``{file}.tmp-{pid}``."""
    pid = path.name.rpartition("-")[2]
    return pid.isdecimal() and lives(int(pid))


def _recover_file(
    folder: Path, path: Path, name: ShardName, done: set[str], *, is_unfinished: bool
) -> Recovered | None:
    try:
        file = path.open("r+b")  # a lock needs a file open for writing
    except FileNotFoundError:
        return None
    with file:
        was_free = lock(file.fileno())
        if was_free is None:  # no locks here: the id in the name tells
            was_free = ".tmp-" not in path.name or not _process_lives(path)
        if not was_free:
            return None
        found = _salvage(path, file)
    shard, saved = None, 0
    if found.run_text is not None:
        target = ShardFile(
            folder,
            replace(name, index=next_index(folder, name)),
            run_text=found.run_text,
            run_digest=found.run_digest,
        )
        for records, block, features in found.blocks:
            new = [record for record in records if record.uid not in done]
            if new:
                if len(new) < len(records):
                    block, features = encoded(new, run_digest=found.run_digest)
                target.append(new, block, features)
                done.update(record.uid for record in new)
                saved += len(new)
        shard = target.finish()
    if is_unfinished or found.is_whole:
        path.unlink()
    else:
        path.rename(path.with_name(path.name + ".damaged"))
    return Recovered(path, shard, saved, found.num_dropped)


def _salvage(path: Path, file: BinaryIO) -> _Salvage:
    """Reads whole blocks until the file ends or makes no sense."""
    run_text: str | None = None
    members: dict[str, dict[str, bytes]] = {}
    found, reached_end = scan_members(file)
    for name, data in found:
        if name == RUN_MEMBER:
            run_text = data.decode(errors="replace")
        else:
            key, _, extension = name.partition(".")
            members.setdefault(key, {})[extension] = data
    salvage = _Salvage(run_text, b"\0" * 16, [], 0, reached_end)
    for key, parts in members.items():
        try:
            data, features = parts[RECORDS], parts.get(FEATURES)
            block = read_block(data)
            records = records_of(block)
            if block.features is not None:
                records = attach_features(block, records, parts[FEATURES])
        except (TrajectoryFormatError, KeyError) as error:
            logger.warning("%s: block %s is dropped: %s", path, key, error)
            salvage.num_dropped += 1
            salvage.is_whole = False
            continue
        salvage.run_digest = block.run_digest
        salvage.blocks.append((records, data, features))
    return salvage
