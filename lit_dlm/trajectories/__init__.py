"""Trajectories: the record of a decode, its storage format, its capture, and its verification.

``record`` holds the record, ``format`` the blocks, ``store`` the shards, ``capture`` the observer
of the decode loop. ``rows`` reads other tools' data; ``tools`` is what commands do with sets.
"""

from lit_dlm.trajectories.record import (
    Trajectory as Trajectory,
    TrajectoryFormatError as TrajectoryFormatError,
)
