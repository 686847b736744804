"""Shards of trajectories on disk.

Files are written by :class:`TrajectoryShardWriter` (in a thread: :class:`BackgroundWriter`), read
by :class:`TrajectoryShardReader`, and kept in order by :func:`recover`, :func:`completed_uids`,
:func:`drop_shards` and :func:`merge_manifest`.
"""

from lit_dlm.trajectories.store.files import ShardName, SideFile, completed_uids, shard_paths
from lit_dlm.trajectories.store.provenance import RunRecord
from lit_dlm.trajectories.store.reader import TrajectoryShardReader
from lit_dlm.trajectories.store.recovery import Recovered, drop_shards, merge_manifest, recover
from lit_dlm.trajectories.store.writer import (
    BackgroundWriter,
    SizeLimitError,
    TrajectoryShardWriter,
)

__all__ = [
    "BackgroundWriter",
    "Recovered",
    "RunRecord",
    "ShardName",
    "SideFile",
    "SizeLimitError",
    "TrajectoryShardReader",
    "TrajectoryShardWriter",
    "completed_uids",
    "drop_shards",
    "merge_manifest",
    "recover",
    "shard_paths",
]
