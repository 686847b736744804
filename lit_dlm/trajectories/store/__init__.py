"""Shards of trajectories on disk.

Files are written by :class:`TrajectoryShardWriter` (in a thread: :class:`BackgroundWriter`), read
by :class:`TrajectoryShardReader` or :func:`stream`, and kept in order by :func:`recover`,
:func:`completed_uids`, :func:`drop_shards` and :func:`merge_manifest`.
"""

from lit_dlm.trajectories.store.background import BackgroundWriter as BackgroundWriter
from lit_dlm.trajectories.store.files import completed_uids as completed_uids
from lit_dlm.trajectories.store.provenance import RunRecord as RunRecord
from lit_dlm.trajectories.store.reader import (
    TrajectoryShardReader as TrajectoryShardReader,
    stream as stream,
)
from lit_dlm.trajectories.store.recovery import (
    drop_shards as drop_shards,
    merge_manifest as merge_manifest,
    recover as recover,
)
from lit_dlm.trajectories.store.writer import TrajectoryShardWriter as TrajectoryShardWriter
