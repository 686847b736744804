"""One error family for everything that can be wrong with stored trajectories."""

from __future__ import annotations


class TrajectoryFormatError(ValueError):
    """Stored bytes are not a well-formed trajectory block, shard or side file."""


class TruncatedBlockError(TrajectoryFormatError):
    """The data ends before the block does, or goes on after its end."""


class ChecksumError(TrajectoryFormatError):
    """A checksum or digest does not match the bytes it covers."""


class UnsupportedFormatError(TrajectoryFormatError):
    """The block was written by a newer or different format that this reader must not guess at."""


class InvariantError(TrajectoryFormatError):
    """The columns decode, but contradict each other or the rules of the format."""


class ShardError(TrajectoryFormatError):
    """A shard disagrees with its side file: members missing, counts wrong, digest wrong."""
