"""Writes records to shards so that a crash loses at most the open block.

A block is encoded when it is full, when its first record waits too long, and on ``flush``; it is
then written and synchronised with the disk. The shard grows under ``{shard}.tmp-{pid}`` and gets
its final name, then its side file, when it is closed. Whatever a dead process left behind is kept
by :func:`lit_dlm.trajectories.recovery.recover`.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from lit_dlm.trajectories.codec import encode_block
from lit_dlm.trajectories.feature_codec import encode_features
from lit_dlm.trajectories.provenance import RunRecord
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.shard_files import (
    RUN_MEMBER,
    TAR_END,
    BlockEntry,
    ShardName,
    SideFile,
    completed_uids,
    merkle_root,
    next_index,
    sync_folder,
    tar_member,
)

logger = logging.getLogger(__name__)

OPEN_FILES: set[Path] = set()
"""Unfinished shards of this very process; recovery must not take them for orphans."""


class ShardFile:
    """One growing shard: appends blocks durably, then takes its final name."""

    def __init__(self, folder: Path, name: ShardName, *, run_text: str, run_digest: bytes) -> None:
        """Creates ``{name}.tmp-{pid}`` and locks it.

        Args:
            folder: where the shard goes.
            name: its final name; must be unused.
            run_text: canonical text of the run record, stored as the first member.
            run_digest: 16 bytes that name the run.

        Raises:
            OSError: If the file cannot be created; it names the path.
        """
        self.folder = folder
        self.name = name
        self.run_digest = run_digest
        self.path = folder / f"{name}.tmp-{os.getpid()}"
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        OPEN_FILES.add(self.path)
        lock(self._fd)
        self._sha = hashlib.sha256()
        self.size = 0
        self._blocks: list[BlockEntry] = []
        self._uids: list[str] = []
        self._digests: list[bytes] = []
        try:
            self._append(tar_member(RUN_MEMBER, run_text.encode()))
        except OSError:
            self.abandon()
            raise

    @property
    def num_records(self) -> int:
        """Records written so far."""
        return len(self._uids)

    def append(self, records: Sequence[Trajectory], block: bytes, features: bytes | None) -> None:
        """Writes one block and waits until it is on disk.

        Args:
            records: the records of the block.
            block: the encoded block.
            features: the encoded features block, if there is one.

        Raises:
            OSError: Naming the path; the file is as it was before the call.
        """
        key = self.name.key(len(self._blocks))
        first = tar_member(f"{key}.trajb", block)
        second = tar_member(f"{key}.featb", features) if features is not None else b""
        offset = self.size
        self._append(first + second)
        header = 512
        self._blocks.append(
            BlockEntry(
                key=key,
                num_records=len(records),
                offset=offset + header,
                size=len(block),
                feature_offset=None if features is None else offset + len(first) + header,
                feature_size=None if features is None else len(features),
            )
        )
        self._uids += [record.uid for record in records]
        self._digests += [record.digest() for record in records]

    def finish(self) -> Path | None:
        """Ends the shard, gives it its final name and writes its side file.

        Returns:
            The shard, or ``None`` when it had no record (then nothing stays).
        """
        if not self._blocks:
            self.abandon()
            self.path.unlink(missing_ok=True)
            return None
        self._append(TAR_END)
        final = self.folder / str(self.name)
        self.abandon()
        self.path.rename(final)
        sync_folder(self.folder)
        SideFile(
            shard=str(self.name),
            bytes=self.size,
            sha256=self._sha.hexdigest(),
            run_digest=self.run_digest.hex(),
            num_records=len(self._uids),
            blocks=tuple(self._blocks),
            uids=tuple(self._uids),
            merkle_root=merkle_root(self._digests),
        ).write(self.folder)
        return final

    def abandon(self) -> None:
        """Closes the file and leaves it as it is."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            OPEN_FILES.discard(self.path)

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
            os.fsync(self._fd)
        except OSError as error:
            # Take back the torn part, so that the shard stays sound and the call can be repeated.
            os.ftruncate(self._fd, self.size)
            os.lseek(self._fd, self.size, os.SEEK_SET)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self._sha.update(data)
        self.size += len(data)


class TrajectoryShardWriter:
    """Puts records into the shards of one rank and worker."""

    def __init__(
        self,
        folder: str | Path,
        *,
        name: str,
        split: str,
        rank: int,
        worker: int = 0,
        run: RunRecord,
        block_size: int = 64,
        max_shard_records: int = 4096,
        max_shard_bytes: int = 256 * 2**20,
        max_block_bytes: int = 32 * 2**20,
        flush_seconds: float = 30.0,
        level: int = 9,
    ) -> None:
        """Opens a set for writing; no shard is created before the first block.

        Args:
            folder: folder of the set, created if need be.
            name: name of the set, of a-z, 0-9, ``_`` and ``-``.
            split: split of the set, of a-z, 0-9 and ``_``.
            rank: rank of this process.
            worker: number of this writer within its process.
            run: what makes these records; stored as ``run.json`` and in every shard.
            block_size: records per block.
            max_shard_records: close a shard at this many records.
            max_shard_bytes: close a shard at this size.
            max_block_bytes: close a block early when its features are this large.
            flush_seconds: a record waits at most this long (looked at on ``put``).
            level: zstd level of records.

        Raises:
            ValueError: If a setting is out of range, or the folder belongs to another run.
            OSError: If the folder cannot be written.
        """
        limits = {
            "block_size": (block_size, 1, 65_535),
            "max_shard_records": (max_shard_records, 1, 2**31),
            "max_shard_bytes": (max_shard_bytes, 1, 2**40),
            "max_block_bytes": (max_block_bytes, 1, 2**30),
        }
        for option, (value, low, high) in limits.items():
            if not low <= value <= high:
                raise ValueError(f"{option}: expected {low} to {high}, got {value}")
        self.folder = Path(folder)
        self._name = ShardName(name, split, rank, worker, 0)
        self.folder.mkdir(parents=True, exist_ok=True)
        run.save(self.folder)
        self._run_text, self._run_digest = run.text(), run.digest()
        self.block_size = block_size
        self.max_shard_records = max_shard_records
        self.max_shard_bytes = max_shard_bytes
        self.max_block_bytes = max_block_bytes
        self.flush_seconds = flush_seconds
        self.level = level
        self.bytes_written = 0
        self._uids = completed_uids(self.folder)
        self._pending: list[Trajectory] = []
        self._pending_bytes = 0
        self._pending_since = 0.0
        self._shard: ShardFile | None = None
        self._closed = False

    def __enter__(self) -> TrajectoryShardWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def put(self, record: Trajectory) -> None:
        """Adds one record; it is on disk after the next flush.

        Args:
            record: must keep every rule of the format and have a new uid.

        Raises:
            ValueError: If the record breaks a rule or its uid was written before; it is not added.
            OSError: Naming the path, if a block cannot be written; its records stay queued.
        """
        if self._closed:
            raise ValueError(f"{self.folder}: the writer is closed")
        record.validate()
        if record.uid in self._uids:
            raise ValueError(f"trajectory {record.uid!r}: this uid is already in {self.folder}")
        if self._pending and _kind(record) != _kind(self._pending[0]):
            self.flush()  # a block holds one vocabulary, one set of signals, one feature layout
        if not self._pending:
            self._pending_since = time.monotonic()
        self._uids.add(record.uid)
        self._pending.append(record)
        self._pending_bytes += 0 if record.features is None else record.features.nbytes
        if (
            len(self._pending) >= self.block_size
            or self._pending_bytes >= self.max_block_bytes
            or time.monotonic() - self._pending_since >= self.flush_seconds
        ):
            self.flush()

    def flush(self) -> None:
        """Writes the open block; when it returns, all records put so far survive a crash.

        Raises:
            OSError: Naming the path; the records stay queued and the call can be repeated.
        """
        if not self._pending:
            return
        records = self._pending
        block = encode_block(records, run_digest=self._run_digest, level=self.level)
        features = None
        if any(record.features is not None for record in records):
            features = encode_features(records, run_digest=self._run_digest)
        if self._shard is None:
            name = self._name
            name = ShardName(
                name.name, name.split, name.rank, name.worker, next_index(self.folder, name)
            )
            self._shard = ShardFile(
                self.folder, name, run_text=self._run_text, run_digest=self._run_digest
            )
        before = self._shard.size
        self._shard.append(records, block, features)
        self.bytes_written += self._shard.size - before
        self._pending, self._pending_bytes = [], 0
        if (
            self._shard.num_records + self.block_size > self.max_shard_records
            or self._shard.size >= self.max_shard_bytes
        ):
            self._finish()

    def close(self) -> None:
        """Flushes and finishes the open shard. Calling it again does nothing.

        Raises:
            OSError: If the last block or the shard cannot be finished; what was flushed before
                stays in the unfinished file, from which it can be recovered.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.flush()
            self._finish()
        finally:
            if self._shard is not None:
                self._shard.abandon()

    def _finish(self) -> None:
        if self._shard is not None:
            path = self._shard.finish()
            self._shard = None
            logger.debug("finished %s", path)


def lock(fd: int) -> bool | None:
    """Takes the lock that says "a living process writes this file".

    Record locks end with their process and are not inherited by forked children, such as loader
    workers that outlive a killed parent for some seconds.

    Returns:
        Whether the lock was free; ``None`` on a file system without locks.
    """
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True


def _kind(record: Trajectory) -> tuple[object, ...]:
    """What all records of one block must share."""
    features = record.features
    layout = None
    if features is not None:
        layout = (features.layout, features.scheme, features.groups, features.projector_digest)
    return record.mask_id, record.vocab_size, tuple(sorted(record.signals)), layout
