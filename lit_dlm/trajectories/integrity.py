"""Verification of files: integrity (V0), structure (V1) and authenticity (V2).

V0 asks whether bytes were changed by accident: archive, lengths and checksums. V1 asks whether the
records obey the rules of the format, so that every intermediate canvas is well defined. V2 asks
whether they are the records that were published: shard digests, Merkle root over the content
digests, the manifest, and the run that every block names. None of them needs a model, and none says
that a model made the records.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lit_dlm.trajectories.container import read_header
from lit_dlm.trajectories.errors import TrajectoryFormatError
from lit_dlm.trajectories.identity import run_of_shard
from lit_dlm.trajectories.shard_files import (
    MANIFEST_FILE,
    SideFile,
    merkle_root,
    scan_members,
    side_path,
)
from lit_dlm.trajectories.shard_reader import TrajectoryShardReader


def check_files(
    shards: Sequence[Path], *, level: int, progress: Callable[[int], None] | None = None
) -> list[str]:
    """Checks shards without running a model.

    Args:
        shards: shards with their side files, all of one folder.
        level: 0 integrity, 1 also structure, 2 also authenticity.
        progress: called with the number of records after each block.

    Returns:
        One line per problem, naming the file and block; none when everything is in order.
    """
    problems: list[str] = []
    owners: dict[str, str] = {}
    for shard in shards:
        problems += _check_shard(shard, level, owners, progress)
    if level >= 2:
        for folder in sorted({shard.parent for shard in shards}):
            problems += _check_manifest(folder, shards)
    return problems


def _check_shard(
    shard: Path,
    level: int,
    owners: dict[str, str],
    progress: Callable[[int], None] | None,
) -> list[str]:
    if not side_path(shard).is_file():
        return [f"{shard}: its side file is missing; recover the folder first"]
    try:
        side = SideFile.read(side_path(shard))
        size = shard.stat().st_size
        reader = TrajectoryShardReader([shard], strict=level >= 1)
    except (OSError, TrajectoryFormatError) as error:
        return [str(error)]
    problems = []
    if size != side.bytes:
        problems.append(f"{shard}: expected {side.bytes} bytes, got {size}")
    digests: list[bytes] = []
    for index, entry in enumerate(side.blocks):
        try:
            records = reader.read_block(shard, index)
        except TrajectoryFormatError as error:
            problems.append(str(error))
            continue
        finally:
            if progress is not None:
                progress(entry.num_records)
        if level >= 1:
            for record in records:
                if record.uid in owners:
                    problems.append(f"{shard}: uid {record.uid!r} is also in {owners[record.uid]}")
                owners[record.uid] = shard.name
        if level >= 2:
            digests += [record.digest() for record in records]
    # Reading by offset passes over the archive's own headers; reading as a stream does not.
    problems += _check_archive(shard, side)
    if level >= 2 and not problems:
        problems += _check_authenticity(shard, side, digests)
    return problems


def _check_archive(shard: Path, side: SideFile) -> list[str]:
    """The tar headers: every block is found where a tar reader looks for it."""
    with shard.open("rb") as file:
        members, reached_end = scan_members(file)
    found = {name.partition(".")[0] for name, _ in members if name.endswith(".trajb")}
    missing = [entry.key for entry in side.blocks if entry.key not in found]
    if missing:
        return [
            f"{shard}: a tar reader finds {len(found)} of {len(side.blocks)} blocks; the archive "
            f"is cut or damaged before {missing[0]!r}"
        ]
    return [] if reached_end else [f"{shard}: the end marker of the archive is missing"]


def _check_authenticity(shard: Path, side: SideFile, digests: list[bytes]) -> list[str]:
    problems = []
    sha256 = hashlib.sha256(shard.read_bytes()).hexdigest()
    if sha256 != side.sha256:
        problems.append(f"{shard}: SHA-256 {side.sha256} in its side file, {sha256} now")
    root = merkle_root(digests)
    if root != side.merkle_root:
        problems.append(f"{shard}: Merkle root {side.merkle_root} in its side file, {root} now")
    try:
        _, run = run_of_shard(shard)
    except TrajectoryFormatError as error:
        return [*problems, str(error)]
    if run != side.run_digest:
        problems.append(f"{shard}: run digest {side.run_digest} in its side file, {run} inside it")
    with shard.open("rb") as file:
        for entry in side.blocks:
            file.seek(entry.offset)
            named = read_header(file.read(entry.size)).run_digest.hex()
            if named != side.run_digest:
                problems.append(
                    f"{shard}: block {entry.key!r} names the run {named}, "
                    f"its side file {side.run_digest}"
                )
    return problems


def _check_manifest(folder: Path, shards: Sequence[Path]) -> list[str]:
    path = folder / MANIFEST_FILE
    if not path.is_file():
        return [f"{path}: there is no manifest, so nothing says which shards were published"]
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        listed = {entry["shard"]: entry for entry in manifest["shards"]}
        root = merkle_root([bytes.fromhex(e["merkle_root"]) for e in manifest["shards"]])
        if root != manifest["merkle_root"]:
            return [f"{path}: Merkle root {manifest['merkle_root']}, its shards give {root}"]
    except (ValueError, KeyError, TypeError) as error:
        return [f"{path}: not a manifest: {error!r}"]
    problems = []
    for shard in (shard for shard in shards if shard.parent == folder):
        entry = listed.get(shard.name)
        if entry is None:
            problems.append(f"{shard}: the manifest does not list it")
            continue
        try:
            side = SideFile.read(side_path(shard))
        except (OSError, TrajectoryFormatError):
            continue  # named already
        problems += [
            f"{shard}: {key} {entry.get(key)} in the manifest, {getattr(side, key)} in its side "
            "file"
            for key in ("bytes", "sha256", "num_records", "merkle_root")
            if entry.get(key) != getattr(side, key)
        ]
    absent = [name for name in listed if not (folder / name).is_file()]
    return problems + [f"{folder / name}: the manifest lists it, but it is gone" for name in absent]
