"""One error family for everything that can be wrong with stored trajectories."""

from __future__ import annotations

from pathlib import Path


class TrajectoryFormatError(ValueError):
    """Stored bytes are not a well-formed trajectory block, shard or side file.

    The message says it all; the attributes repeat the place for programs, as far as it is known.
    """

    def __init__(
        self,
        message: str,
        *,
        file: str | Path | None = None,
        member: str | None = None,
        offset: int | None = None,
        record: str | None = None,
    ) -> None:
        """Describes the damage.

        Args:
            message: what was expected and what came.
            file: the file.
            member: key of the block inside the file.
            offset: byte, counted from the start of the file or, without ``file``, of the block.
            record: uid of the record.
        """
        super().__init__(message)
        self.file = file
        self.member = member
        self.offset = offset
        self.record = record


class BadMagicError(TrajectoryFormatError):
    """The bytes are something else, or went through a text-mode transfer."""


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
