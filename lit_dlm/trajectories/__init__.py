"""Trajectories: the record of a decode, its storage format, and its capture.

``record`` and ``compare`` hold the record, ``codec`` the block format, ``shards`` the files,
``provenance`` the description of a run, ``capture`` the observer of the decode loop.
"""

from lit_dlm.trajectories.compare import TrajectoryDiff, diff
from lit_dlm.trajectories.errors import TrajectoryFormatError
from lit_dlm.trajectories.features import StepFeatures
from lit_dlm.trajectories.record import Trajectory, from_history

__all__ = [
    "StepFeatures",
    "Trajectory",
    "TrajectoryDiff",
    "TrajectoryFormatError",
    "diff",
    "from_history",
]
