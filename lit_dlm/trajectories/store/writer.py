"""Writes records to shards so that a crash loses at most the open block.

A block is encoded when it is full, when its first record has waited too long, and on ``flush``; it
is then written and synchronised with the disk. The shard grows under ``{shard}.tmp-{pid}`` and gets
its final name, then its side file, when it is closed: whatever a crash leaves is a whole shard, a
whole shard without its side file, or blocks with at most a torn one behind them.
"""

from __future__ import annotations

import errno
import hashlib
import os
import tarfile
import time
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path

from lit_dlm.system.files import sync_folder
from lit_dlm.system.locks import lock
from lit_dlm.system.options import at_least, within
from lit_dlm.trajectories.format import meta_text
from lit_dlm.trajectories.members import encode_members
from lit_dlm.trajectories.record import Trajectory, checked
from lit_dlm.trajectories.store.files import (
    FEATURES,
    RECORDS,
    RUN_KEY,
    TAR_END,
    BlockEntry,
    ShardName,
    SideFile,
    completed_uids,
    member_bytes,
    tar_members,
)
from lit_dlm.trajectories.store.provenance import RunRecord

MAX_SHARD_BYTES = 256 * 2**20
"""A shard is closed at this size."""
MAX_BLOCK_BYTES = 32 * 2**20
"""A block is closed early when its records take this much memory."""
FLUSH_SECONDS = 30.0
"""A record waits at most this long (checked on ``put``)."""
_RECORD_OVERHEAD = 2048
"""Bytes of a record's Python objects, roughly."""
OPEN_FILES: set[Path] = set()
"""Unfinished shards of this process; recovery must not take them for orphans."""


class ShardFile:
    """One growing shard: appends blocks durably, then takes its final name."""

    def __init__(self, folder: Path, name: ShardName, *, run_text: str, run_digest: bytes) -> None:
        """Creates ``{name}.tmp-{pid}`` and locks it; the run's text is the first member."""
        self.folder = folder
        self.name = name
        self.run_digest = run_digest
        self.path = folder / f"{name}.tmp-{os.getpid()}"
        # Exclusively, so that two writers that chose one name never share a file.
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        OPEN_FILES.add(self.path)
        lock(self._fd)  # recovery by another process leaves the file alone while this one lives
        self._sha = hashlib.sha256()
        self.size = 0
        self._is_synced = True
        self._blocks: list[BlockEntry] = []
        self.uids: list[str] = []
        try:
            self._append(tar_members(RUN_KEY, {"json": run_text.encode()}))
        except OSError:
            self.abandon()
            raise

    def append(
        self,
        records: Sequence[Trajectory],
        block: bytes,
        features: bytes | None,
        *,
        sync: bool = True,
    ) -> None:
        """Appends one encoded block, and its features, and waits until they are on disk.

        Without ``sync`` the bytes are only handed to the operating system: they survive the death
        of this process, but that of the machine only after :meth:`sync`. After an ``OSError`` the
        file is as it was before the call.
        """
        key = self.name.key(len(self._blocks))
        first = self.size + tarfile.BLOCKSIZE
        members, offset = {RECORDS: block}, first
        if features is not None:  # TarWriter sorts the names
            members[FEATURES], offset = features, first + member_bytes(features)
        self._append(tar_members(key, members), sync=sync)
        self._blocks.append(
            BlockEntry(
                key=key,
                num_records=len(records),
                offset=offset,
                size=len(block),
                crc32=zlib.crc32(block),
                feature_offset=None if features is None else first,
                feature_size=None if features is None else len(features),
                feature_crc32=None if features is None else zlib.crc32(features),
            )
        )
        self.uids += [record.uid for record in records]

    def finish(self) -> Path:
        """Gives the shard, which must hold a block, its final name and its side file."""
        self._append(TAR_END)
        final = self.folder / str(self.name)
        self.abandon()
        # In this order: content, name, side file, each on disk before the next. Were the side file
        # there first, a crash could leave it beside a shard that is shorter than it says.
        self.path.rename(final)
        sync_folder(self.folder)
        SideFile(
            shard=str(self.name),
            bytes=self.size,
            sha256=self._sha.hexdigest(),
            run_digest=self.run_digest.hex(),
            num_records=len(self.uids),
            blocks=tuple(self._blocks),
            uids=tuple(self.uids),
        ).write(self.folder)
        return final

    def sync(self) -> None:
        if not self._is_synced:
            try:
                os.fsync(self._fd)
            except OSError as error:
                # A later call may succeed although the kernel has dropped the pages that it could
                # not write: only reading the file again tells, which is left to recovery.
                self.abandon()
                raise OSError(error.errno, error.strerror, str(self.path)) from error
            self._is_synced = True

    def abandon(self) -> None:
        """Closes the file and leaves it as it is."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            OPEN_FILES.discard(self.path)

    def _append(self, data: bytes | memoryview, *, sync: bool = True) -> None:
        view = memoryview(data)
        try:
            if not os.fstat(self._fd).st_nlink:  # raises on -1, after abandon
                raise FileNotFoundError(errno.ENOENT, "was deleted during the run")
            while view:  # a write may take a part, as on a full disk
                view = view[os.write(self._fd, view) :]
            if sync:
                os.fsync(self._fd)
            self._is_synced = sync
        except OSError as error:
            # Remove the torn block: the shard stays valid and the call can be repeated. Behind it,
            # further blocks would be lost to whoever reads the shard as a stream.
            if self._fd >= 0:
                os.ftruncate(self._fd, self.size)
                os.lseek(self._fd, self.size, os.SEEK_SET)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self._sha.update(data)  # of what was written, so that finish need not read it again
        self.size += len(data)


class TrajectoryShardWriter:
    """Writes records to the shards of one rank."""

    def __init__(
        self,
        folder: str | Path,
        *,
        name: str,
        split: str,
        rank: int,
        run: RunRecord,
        records_per_block: int = 64,
        max_shard_records: int = 4096,
        max_total_bytes: int | None = None,
        held: Collection[str] | None = None,
    ) -> None:
        """Opens a set for writing; no shard is created before the first block.

        Args:
            folder: folder of the set, created if need be.
            name: name of the set; with ``split`` and ``rank`` it makes the :class:`ShardName`.
            run: the run that makes these records; stored as ``run.json`` and in every shard.
            records_per_block: number of records at which a block is closed.
            max_shard_records: number of records at which a shard is closed.
            max_total_bytes: raise an error once this writer has written more.
            held: uids in the folder, if the caller has just recovered it and saved the run there;
                otherwise the side files are read here.
        """
        within("[1, 65535]", records_per_block=records_per_block)
        at_least(1, max_shard_records=max_shard_records)
        self.folder = Path(folder)
        self._name = ShardName(name, split, rank, 0)
        if held is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            run.save(self.folder)
            held = completed_uids(self.folder)
        self._run_text, self._run_digest = run.text(), run.digest()
        self.records_per_block = records_per_block
        self.max_shard_records = max_shard_records
        self.sync_blocks = True
        """Whether to wait for the disk after every block. ``False`` leaves that to :meth:`sync`, so
        that one wait can serve several blocks."""
        self.max_total_bytes = max_total_bytes
        self.bytes_written = 0
        self._uids = set(held)
        self._pending: list[Trajectory] = []
        self._metas: list[str | None] = []  # their texts, which are made when a record is checked
        self._pending_bytes = 0
        self._pending_since = 0.0
        self._shard: ShardFile | None = None
        self._closed = False

    def __enter__(self) -> TrajectoryShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def seconds_left(self) -> float | None:
        """Seconds until the open block is due (0 or less: now); ``None`` when it is empty."""
        if not self._pending:
            return None
        return self._pending_since + FLUSH_SECONDS - time.monotonic()

    def put(self, *records: Trajectory) -> None:
        """Adds records, whose uids must be new; they are on disk after the next flush.

        A record that breaks a rule is not added; the first error is raised after all others are.
        After an ``OSError`` those behind the record that was being added are missing.
        """
        assert not self._closed, "the writer is closed"
        is_valid = True
        try:
            # Together, as a few long arrays: alone, this would take as long as encoding.
            if records:
                checked(records)
        except ValueError:
            is_valid = False  # find out which: the others must not be lost
        refused: ValueError | None = None
        for record in records:
            try:
                if not is_valid:
                    record.validate()
                self._add(record)
            except ValueError as error:
                refused = refused or error
        if refused is not None:
            raise refused

    def _add(self, record: Trajectory) -> None:
        """Adds a record that was checked, and writes the open block if it is full or due."""
        meta = meta_text(record)
        if record.uid in self._uids:
            raise ValueError(f"trajectory {record.uid!r}: this uid is already in {self.folder}")
        # Columns and metadata of a block are shared: vocabulary, set of signals, feature layout.
        if self._pending and _kind(record) != _kind(self._pending[0]):
            self._write_pending()
        if not self._pending:
            self._pending_since = time.monotonic()
        self._uids.add(record.uid)
        self._pending.append(record)
        self._metas.append(meta)
        self._pending_bytes += record_bytes(record)
        if (
            len(self._pending) >= self.records_per_block
            or self._pending_bytes >= MAX_BLOCK_BYTES
            or time.monotonic() - self._pending_since >= FLUSH_SECONDS
        ):
            self._write_pending()

    def flush(self) -> None:
        """Writes the open block; when it returns, all records put so far survive a crash.

        After an ``OSError`` the records stay queued and the call can be repeated.
        """
        self._write_pending()
        self.sync()

    def sync(self) -> None:
        if self._shard is not None:
            self._shard.sync()

    def finish_shard(self) -> None:
        """Writes the open block and gives the open shard its final name and side file."""
        self._write_pending()
        self._finish()

    def _write_pending(self) -> None:
        if not self._pending:
            return
        try:
            members = encode_members(
                self._pending, run_digest=self._run_digest, metas=self._metas, check=False
            )
        except ValueError:  # every later call would fail too
            self._forget_pending()
            raise
        if self._shard is None:  # only now: a writer without records leaves no file
            self._shard = ShardFile(
                self.folder,
                self._name.next_in(self.folder),
                run_text=self._run_text,
                run_digest=self._run_digest,
            )
        before = self._shard.size
        self._shard.append(self._pending, *members, sync=self.sync_blocks)
        self.bytes_written += self._shard.size - before
        self._forget_pending()
        # Closed before the next block could make it larger than a shard may be.
        if (
            len(self._shard.uids) + self.records_per_block > self.max_shard_records
            or self._shard.size >= MAX_SHARD_BYTES
        ):
            self._finish()
        if self.max_total_bytes is not None and self.bytes_written > self.max_total_bytes:
            raise OSError(
                f"max_gigabytes: the writer of {self.folder} has reached its limit of "
                f"{self.max_total_bytes} bytes; what was written is kept, raise it to go on"
            )

    def _forget_pending(self) -> None:
        self._pending, self._metas, self._pending_bytes = [], [], 0

    def close(self) -> None:
        """Flushes and finishes the open shard; what a failure leaves behind can be recovered."""
        if self._closed:
            return
        self._closed = True
        self.max_total_bytes = None  # the pending records were accepted before the limit
        try:
            try:
                self._write_pending()
            finally:
                # If a block could not be written, the shard is left to recovery, as its records
                # are still missing; if a record could not be encoded, the others are complete.
                if not self._pending:
                    self._finish()
        finally:
            if self._shard is not None:
                self._shard.abandon()

    def _finish(self) -> None:
        if self._shard is not None:
            self._shard.finish()
            self._shard = None


def _kind(record: Trajectory) -> tuple[object, ...]:
    """What all records of one block must share."""
    kind = None if record.features is None else record.features.kind
    return record.mask_id, record.vocab_size, tuple(sorted(record.signals)), kind


def record_bytes(record: Trajectory) -> int:
    """Approximate memory that a record takes, in bytes."""
    arrays = [record.prompt_ids, record.tokens, record.commit_step, *record.signals.values()]
    optional = (record.given, record.superseded, record.features)
    return _RECORD_OVERHEAD + sum(one.nbytes for one in (*arrays, *optional) if one is not None)
