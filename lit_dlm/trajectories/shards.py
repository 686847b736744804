"""Shards of trajectories: the names to import.

Files are written by :class:`TrajectoryShardWriter` (in a thread: :class:`BackgroundWriter`), read
by :class:`TrajectoryShardReader`, and kept in order by :func:`recover`, :func:`completed_uids`,
:func:`drop_shards` and :func:`merge_manifest`.
"""

from lit_dlm.trajectories.background import BackgroundWriter, QueueFullError, Ticket
from lit_dlm.trajectories.provenance import RunRecord
from lit_dlm.trajectories.recovery import Recovered, drop_shards, merge_manifest, recover
from lit_dlm.trajectories.shard_files import ShardName, SideFile, completed_uids
from lit_dlm.trajectories.shard_reader import TrajectoryShardReader
from lit_dlm.trajectories.shard_writer import SizeLimitError, TrajectoryShardWriter

__all__ = [
    "BackgroundWriter",
    "QueueFullError",
    "Recovered",
    "RunRecord",
    "ShardName",
    "SideFile",
    "SizeLimitError",
    "Ticket",
    "TrajectoryShardReader",
    "TrajectoryShardWriter",
    "completed_uids",
    "drop_shards",
    "merge_manifest",
    "recover",
]
