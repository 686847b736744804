"""Maintains a folder of shards, and saves what a killed process left in it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_dlm.system.files import write_atomically
from lit_dlm.system.locks import lives, lock
from lit_dlm.trajectories.members import decode_members, encode_members
from lit_dlm.trajectories.record import TrajectoryFormatError, expect
from lit_dlm.trajectories.store.files import (
    FEATURES,
    MANIFEST_FILE,
    RECORDS,
    RUN_KEY,
    VERSION,
    ShardName,
    SideFile,
    archived_blocks,
    claim_uids,
    shards_in,
    side_files,
    side_path,
)
from lit_dlm.trajectories.store.writer import OPEN_FILES, ShardFile

logger = logging.getLogger(__name__)

MANIFEST_FORMAT = "lit-dlm/trajectory-manifest"


@dataclass(frozen=True)
class Recovered:
    """What :func:`recover` did with one file."""

    path: Path  # The orphan; it is gone (or has .damaged appended)
    shard: Path | None  # The shard that now holds its records; None if it had no new ones
    num_records: int
    num_dropped_blocks: int  # Blocks that were cut, corrupt, or lacked their features


def recover(folder: str | Path) -> tuple[list[Recovered], set[str]]:
    """Saves the intact blocks of unfinished shards of dead processes.

    Each such file is read as far as possible; blocks that pass every check go into a new shard of
    the same series, records that a finished shard already holds are left out, and the file is
    deleted. A finished shard without a side file is treated the same way, but kept as ``.damaged``
    if anything in it was lost. If two finished shards hold the same records, written by two
    processes, the second ones are removed. Run it before a folder is resumed, by one process, while
    no other starts to write there; running it again changes nothing.

    Returns:
        What was done with each file, and the uids that the folder holds now.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return [], set()
    sides = side_files(folder)  # read once: they list every uid of the folder
    held = {uid for side in sides for uid in side.uids}
    reports = []
    # Sorted, so that of two orphans with the same records it is always the first that keeps them.
    for path in sorted(folder.iterdir()):
        if ".json.tmp-" in path.name and not _owner_lives(path):
            path.unlink(missing_ok=True)  # a side file or manifest that was being written
        parsed = ShardName.parse(path)
        # A lock does not keep this process from its own files, so they are known by name.
        if parsed is None or path in OPEN_FILES:
            continue
        name, is_unfinished = parsed
        if is_unfinished or not side_path(path).exists():
            reports += _recover_file(path, name, held, is_unfinished=is_unfinished)
    return reports + _without_doubles(folder, sides), held


def _without_doubles(folder: Path, sides: Sequence[SideFile]) -> list[Recovered]:
    """Rewrites shards that repeat records of earlier ones, without the repeated records."""
    seen: set[str] = set()
    reports = []
    for side in sides:
        path = folder / side.shard
        parsed = ShardName.parse(path)
        if seen.isdisjoint(side.uids):
            seen.update(side.uids)
        elif parsed is not None and path.exists():  # it may have been deleted, its side file left
            # Should the process die now, the shard has no side file and is recovered in this way.
            _forget(folder, side)
            reports += _recover_file(path, parsed[0], seen, is_unfinished=False)
    return reports


def _forget(folder: Path, side: SideFile) -> None:
    """Deletes a shard's side file, and the manifest; the shard itself stays.

    The manifest first: it must never list a shard that does not count as finished.
    """
    (folder / MANIFEST_FILE).unlink(missing_ok=True)
    side_path(folder / side.shard).unlink()


def drop_shards(folder: str | Path, is_stale: Callable[[str], bool]) -> int:
    """Deletes finished shards of records that are to be rewritten; returns the number of records.

    One process must do this, after :func:`recover` and while no other writes there. The manifest is
    deleted too, until the folder is merged again. A shard with other records as well is an error.
    """
    folder = Path(folder)
    stale = [side for side in side_files(folder) if any(map(is_stale, side.uids))]
    for side in stale:  # all are checked before the first is deleted
        kept = [uid for uid in side.uids if not is_stale(uid)]
        expect(
            not kept,
            f"{folder / side.shard}: expected records that are all to be replaced or all to "
            f"be kept, got {len(kept)} to keep ({kept[:1]}) of {side.num_records}",
        )
    for side in stale:
        _forget(folder, side)
        (folder / side.shard).unlink()
    return sum(side.num_records for side in stale)


def merge_manifest(folder: str | Path) -> dict[str, Any]:
    """Merges all side files of a folder into ``manifest.json``; can be repeated at any time."""
    folder = Path(folder)
    sides = side_files(folder)
    alone = {path.name for path in shards_in(folder)}.difference(side.shard for side in sides)
    problems = [f"{folder / name}: a shard without side file, recover it" for name in sorted(alone)]
    problems += [problem for side in sides if (problem := side.size_problem(folder / side.shard))]
    expect(not problems, "; ".join(problems))
    owners: dict[str, str] = {}
    for side in sides:
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
    write_atomically(folder / MANIFEST_FILE, json.dumps(manifest, indent=1))
    return manifest


def _owner_lives(path: Path) -> bool:
    """Whether this machine runs the process whose id ends the name ``{file}.tmp-{pid}``."""
    pid = path.name.rpartition("-")[2]
    return ".tmp-" in path.name and pid.isdecimal() and lives(int(pid))


def _is_orphan(path: Path) -> bool:
    """Whether a file is there and no living process writes it."""
    try:
        file = path.open("r+b")  # a lock needs a file open for writing
    except FileNotFoundError:
        return False
    # Closing any handle of the file gives up the lock, so all reading comes after.
    with file:
        is_free = lock(file.fileno())
    # None: no locks on this file system, so the process id in the name decides.
    return not _owner_lives(path) if is_free is None else is_free


def _recover_file(
    path: Path, name: ShardName, held: set[str], *, is_unfinished: bool
) -> list[Recovered]:
    """Moves intact new records into a shard of their own; does nothing if the file is in use."""
    if not _is_orphan(path):
        return []
    # In order and not by offset: without a side file nothing says where the blocks are.
    members, is_whole = archived_blocks(path)
    run_text = members.pop(RUN_KEY, {}).get("json", b"").decode(errors="replace")
    target: ShardFile | None = None
    saved = dropped = 0
    for key, parts in members.items():
        try:
            read, records = decode_members(parts[RECORDS], parts.get(FEATURES))
        except (TrajectoryFormatError, KeyError) as error:
            logger.warning("%s: block %s is dropped: %s", path, key, error)
            dropped += 1
            continue
        new = [record for record in records if record.uid not in held]
        if not new:
            continue
        if target is None:
            free = name.next_in(path.parent)
            target = ShardFile(path.parent, free, run_text=run_text, run_digest=read.run_digest)
        block, features = parts[RECORDS], parts.get(FEATURES)
        # Bytes are copied as they are, except where some records are elsewhere already.
        if len(new) < len(records):
            block, features = encode_members(new, run_digest=read.run_digest, check=False)
        target.append(new, block, features)
        held.update(record.uid for record in new)
        saved += len(new)
    # Deleted only once its records are on disk elsewhere: a crash in between leaves both, and the
    # next recovery finds every record of the orphan in a finished shard.
    shard = None if target is None else target.finish()
    # An unfinished file was cut by its process; a finished one that is corrupt is kept.
    if is_unfinished or (is_whole and not dropped):
        path.unlink()
    else:
        path.rename(path.with_name(path.name + ".damaged"))
    logger.warning("%s: recovered %d records, dropped %d blocks", path, saved, dropped)
    return [Recovered(path, shard, saved, dropped)]
