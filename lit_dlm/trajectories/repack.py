"""Rewrites a set with other blocks and stronger compression; records and digests stay the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_dlm.trajectories.errors import ShardError
from lit_dlm.trajectories.identity import run_of_shard
from lit_dlm.trajectories.recovery import merge_manifest, recover
from lit_dlm.trajectories.shard_files import ShardName, completed_uids, shards_in
from lit_dlm.trajectories.shard_reader import TrajectoryShardReader
from lit_dlm.trajectories.shard_writer import TrajectoryShardWriter


@dataclass(frozen=True)
class Repacked:
    """What :func:`repack` did."""

    num_records: int
    """Records in the new set."""
    bytes_before: int
    """Bytes of the old shards."""
    bytes_after: int
    """Bytes of the new shards."""


def repack(
    shards: Sequence[Path],
    folder: Path,
    *,
    block_size: int = 256,
    level: int = 19,
    progress: Callable[[int], None] | None = None,
) -> Repacked:
    """Writes the records of shards into a new folder.

    The old shards are only read. A repack that was broken off is taken up again by calling it once
    more: what had been finished stays, the rest is written. At the end every content digest is
    compared with that of the old record.

    Args:
        shards: shards to read, with side files beside them.
        folder: where the new set goes; another folder than theirs.
        block_size: records per block.
        level: zstd level; 19 is 10 to 25 times slower than 9 and saves 5 to 9 %.
        progress: called with the number of records, twice for each (written, compared).

    Returns:
        Counts and sizes.

    Raises:
        ValueError: the folder is that of a source, or holds another run.
        ShardError: a shard is damaged, or a digest is not the same afterwards.
        OSError: the folder cannot be written.
    """
    if any(shard.parent.resolve() == folder.resolve() for shard in shards):
        raise ValueError(f"repack: {folder} holds shards that are to be read; give another folder")
    recover(folder)
    done = completed_uids(folder)
    wanted: dict[str, bytes] = {}
    for shard in shards:
        name = ShardName.parse(shard)
        if name is None:
            raise ValueError(f"{shard}: expected the name of a trajectory shard")
        run, _ = run_of_shard(shard)
        with TrajectoryShardWriter(
            folder,
            name=name[0].name,
            split=name[0].split,
            rank=name[0].rank,
            worker=name[0].worker,
            run=run,
            block_size=block_size,
            level=level,
        ) as writer:
            for record in TrajectoryShardReader([shard]):
                if record.uid in wanted:
                    raise ShardError(f"{shard}: uid {record.uid!r} is in another shard too")
                wanted[record.uid] = record.digest()
                if record.uid not in done:
                    writer.put(record)
                if progress is not None:
                    progress(1)
    merge_manifest(folder)
    made = shards_in(folder)
    for record in TrajectoryShardReader(made, features=False):
        digest = wanted.pop(record.uid, None)
        if digest is not None and digest != record.digest():
            raise ShardError(f"{folder}: {record.uid!r} has another content digest than before")
        if progress is not None and digest is not None:
            progress(1)
    if wanted:
        raise ShardError(
            f"{folder}: {len(wanted)} records are missing, {next(iter(wanted))!r} first"
        )
    return Repacked(
        num_records=len(TrajectoryShardReader(made).uids),
        bytes_before=sum(shard.stat().st_size for shard in shards),
        bytes_after=sum(shard.stat().st_size for shard in made),
    )
