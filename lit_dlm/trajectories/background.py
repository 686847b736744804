"""Writes records in a thread, so that a decode loop waits neither for zstd nor for the disk.

One thread per process takes records from a queue that is bounded in bytes and runs a
:class:`TrajectoryShardWriter`. Encoding and hashing release the interpreter lock. Blocks that are
waiting together share one wait for the disk.

Nothing is lost in silence. A full queue makes :meth:`BackgroundWriter.put` wait (or raise, as
asked); an error of the thread ends it and is raised by the next ``put`` and by ``close``; what was
written before the error is finished as far as the disk allows. Dropping records exists only on
request, and the manifest then says that the set is incomplete.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Literal

from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.shard_files import DROPPED_SUFFIX, write_atomically
from lit_dlm.trajectories.shard_writer import TrajectoryShardWriter

logger = logging.getLogger(__name__)

OnFull = Literal["block", "error", "drop"]
Source = Trajectory | Callable[[], Iterable[Trajectory]]

_GROUP_BYTES = 8 * 2**20  # taken from the queue at a time: they share one wait for the disk
_WAKE_SECONDS = 1.0  # how often an idle thread looks whether the program has ended
_RECORD_OVERHEAD = 2048  # bytes of a record's Python objects, roughly


class QueueFullError(RuntimeError):
    """The queue is full and ``on_full`` says not to wait."""


class Ticket:
    """What :meth:`BackgroundWriter.put` returns: a claim on the records that were put."""

    __slots__ = ("_number", "_writer")

    def __init__(self, writer: BackgroundWriter, number: int) -> None:
        self._writer = writer
        self._number = number

    @property
    def done(self) -> bool:
        """Whether the records stand in a shard with its final name."""
        return self._writer._is_done(self._number)

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the records can be read: synchronised, renamed, with a side file.

        The open shard is finished for it, so waiting for every record makes a shard of every
        record. Records that nobody waits for are finished in large shards.

        Args:
            timeout: seconds; ``None`` waits as long as it takes.

        Raises:
            TimeoutError: If it took longer.
            QueueFullError: If the records were dropped.
            BaseException: What broke the writer before these records were safe.
        """
        self._writer._wait(self._number, timeout)


class BackgroundWriter:
    """Puts records into shards from a thread of its own."""

    def __init__(
        self,
        writer: TrajectoryShardWriter,
        *,
        max_queue_bytes: int = 256 * 2**20,
        on_full: OnFull = "block",
    ) -> None:
        """Starts the thread.

        Args:
            writer: writes the shards; belongs to the thread from now on.
            max_queue_bytes: records waiting (being written included) may take this much memory.
                One larger item is accepted when nothing else waits.
            on_full: what ``put`` does then: ``block`` waits (the time is counted and logged),
                ``error`` raises, ``drop`` leaves the records out and marks the set as incomplete.

        Raises:
            ValueError: If a setting is out of range.
        """
        if max_queue_bytes < 1:
            raise ValueError(f"max_queue_bytes: expected at least 1, got {max_queue_bytes}")
        if on_full not in ("block", "error", "drop"):
            raise ValueError(f"on_full: expected 'block', 'error' or 'drop', got {on_full!r}")
        self.max_queue_bytes = max_queue_bytes
        self.on_full: OnFull = on_full
        self.blocked_seconds = 0.0
        """How long ``put`` waited for room, in all."""
        self.num_dropped = 0
        """Records that were left out (``drop`` only)."""
        self.peak_queue_bytes = 0
        """The most that ever waited."""
        self._writer = writer
        self._writer.sync_blocks = False
        self._queue: deque[tuple[int, Source, int]] = deque()
        self._queue_bytes = 0
        self._changed = threading.Condition()
        self._last = 0  # number of the newest ticket
        self._wanted = 0  # newest ticket that somebody waits for
        self._finished = 0  # all tickets up to this one can be read
        self._is_idle = False
        self._errors: dict[int, BaseException] = {}  # tickets that failed on their own
        self._dropped: list[str] = []
        self._open: list[tuple[int, list[str]]] = []  # uids by ticket, since the last whole block
        self._broken_at = 1  # should the thread break: the first ticket that is not wholly put
        self._whole_at = 1  # records put once that ticket is wholly put
        self._error: BaseException | None = None
        self._was_raised = False
        self._closing = False
        # No daemon: a program that forgets to close ends with its shards finished, see _run.
        self._thread = threading.Thread(target=self._run, name="trajectory-writer")
        self._thread.start()

    def __enter__(self) -> BackgroundWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def bytes_written(self) -> int:
        """Bytes of shards written so far."""
        return self._writer.bytes_written

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def put(self, record: Trajectory) -> Ticket:
        """Queues one record.

        Args:
            record: is checked by the thread; must not be changed any more.

        Returns:
            A ticket to wait for, if need be.

        Raises:
            QueueFullError: With ``on_full='error'``.
            ValueError: After ``close``.
            BaseException: What broke the thread since the last call.
        """
        return self._enqueue(record, [record.uid], record_bytes(record))

    def put_batch(
        self, make: Callable[[], Iterable[Trajectory]], *, uids: Sequence[str], nbytes: int
    ) -> Ticket:
        """Queues records that the thread itself makes, such as those of a captured batch.

        Args:
            make: called once, in the thread.
            uids: names of the records it will make.
            nbytes: memory that waits with it.

        Returns:
            One ticket for all of them.

        Raises:
            QueueFullError: With ``on_full='error'``.
            ValueError: After ``close``.
            BaseException: What broke the thread since the last call.
        """
        return self._enqueue(make, uids, nbytes + _RECORD_OVERHEAD * len(uids))

    def flush(self) -> None:
        """Waits until everything put so far is synchronised, renamed and has its side file.

        Raises:
            BaseException: What broke the thread.
        """
        with self._changed:
            last = self._last
        self._wait_until(last, None)

    def close(self) -> None:
        """Writes what is queued, finishes the shard and joins the thread.

        Raises:
            BaseException: What broke the thread. Calling it again does nothing.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        if self.blocked_seconds > 0.5:
            logger.warning(
                "%s: decoding waited %.1f s for the writer of trajectories",
                self._writer.folder,
                self.blocked_seconds,
            )
        if self._error is not None and not self._was_raised:
            self._was_raised = True
            raise self._error

    # -- the caller's side ---------------------------------------------------------------------

    def _enqueue(self, source: Source, uids: Sequence[str], nbytes: int) -> Ticket:
        with self._changed:
            self._check_open()
            if self._is_too_much(nbytes):
                if self.on_full == "drop":
                    self._last += 1
                    self._drop(self._last, uids)
                    return Ticket(self, self._last)
                if self.on_full == "error":
                    raise QueueFullError(
                        f"max_queue_bytes: {self._queue_bytes} bytes wait for the disk already and "
                        f"{nbytes} more exceed {self.max_queue_bytes}; the writer of "
                        f"{self._writer.folder} is too slow"
                    )
                self._wait_for_room(nbytes)
            self._last += 1
            number = self._last
            self._queue.append((number, source, nbytes))
            self._queue_bytes += nbytes
            self.peak_queue_bytes = max(self.peak_queue_bytes, self._queue_bytes)
            if self._is_idle:
                self._changed.notify_all()
        return Ticket(self, number)

    def _is_too_much(self, nbytes: int) -> bool:
        return self._queue_bytes > 0 and self._queue_bytes + nbytes > self.max_queue_bytes

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closing:
            raise ValueError(f"{self._writer.folder}: the writer is closed")

    def _wait_for_room(self, nbytes: int) -> None:
        begin = time.monotonic()
        while self._is_too_much(nbytes):
            self._changed.wait()
            self._check_open()
        self.blocked_seconds += time.monotonic() - begin

    def _drop(self, number: int, uids: Sequence[str]) -> None:
        if not self._dropped:
            logger.warning(
                "%s: the queue is full, records are dropped; the set will be incomplete",
                self._writer.folder,
            )
        self._dropped += uids
        self.num_dropped += len(uids)
        self._errors[number] = QueueFullError(
            f"trajectory {uids[0]!r} and {len(uids) - 1} more were dropped: the queue was full"
        )

    def _is_done(self, number: int) -> bool:
        with self._changed:
            return number <= self._finished and number not in self._errors

    def _wait(self, number: int, timeout: float | None) -> None:
        """Waits for one ticket."""
        with self._changed:
            error = self._errors.get(number)  # dropped
        if error is None:
            self._wait_until(number, timeout)
            error = self._errors.get(number)  # refused
        if error is not None:
            raise error

    def _wait_until(self, number: int, timeout: float | None) -> None:
        """Waits until all records of the tickets up to one can be read."""
        with self._changed:
            self._wanted = max(self._wanted, number)
            self._changed.notify_all()
            over = self._changed.wait_for(
                lambda: number <= self._finished or self._error is not None, timeout
            )
            if not over:
                raise TimeoutError(
                    f"{self._writer.folder}: the records were not on disk after {timeout} s"
                )
            if number > self._finished and self._error is not None:
                raise self._error

    # -- the thread's side ---------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._turn():
                pass
            self._writer.close()
            self._report_dropped()
        except BaseException as error:  # whatever it is belongs to the caller, not to this thread
            self._break(error)
        else:
            with self._changed:
                self._finished = self._last
                self._changed.notify_all()

    def _turn(self) -> bool:
        """Waits for work and does some; ``False`` when all is done and the writer closes."""
        with self._changed:
            if not self._has_work():
                due = self._writer.seconds_left()
                self._is_idle = True
                self._changed.wait(_WAKE_SECONDS if due is None else min(max(due, 0), 1.0))
                self._is_idle = False
            if not self._closing and not threading.main_thread().is_alive():
                logger.error("%s: the writer was never closed", self._writer.folder)
                self._closing = True
            group, size = [], 0
            while self._queue and size < _GROUP_BYTES:
                group.append(self._queue.popleft())
                size += group[-1][2]
            handled = self._queue[0][0] - 1 if self._queue else self._last
            is_last = self._closing and not self._queue
            wanted = self._wanted
        for number, source, _ in group:
            self._write(number, source)
        due = self._writer.seconds_left()
        if due is not None and due <= 0:
            self._writer.flush()
        self._writer.sync()
        if self._finished < wanted <= handled:
            self._writer.finish_shard()
        with self._changed:
            self._queue_bytes -= size
            if self._writer.num_open == 0:
                self._finished = handled
            self._changed.notify_all()
        return not is_last

    def _has_work(self) -> bool:
        return bool(self._queue) or self._closing or self._wanted > self._finished

    def _write(self, number: int, source: Source) -> None:
        self._broken_at = number
        records = [source] if isinstance(source, Trajectory) else list(source())
        if self._writer.num_pending == 0:
            self._open.clear()
        self._open.append((number, [record.uid for record in records]))
        self._whole_at = self._writer.num_put + len(records)
        for record in records:
            self._writer.put(record, check=False)
        self._broken_at, self._whole_at = number + 1, self._writer.num_put + 1

    def _break(self, error: BaseException) -> None:
        """Finishes what can be finished, and lets everybody who waits know."""
        try:
            self._writer.close()
            self._report_dropped()
            saved = True
        except BaseException:  # the first error is the one to report
            logger.exception("%s: the last shard could not be finished", self._writer.folder)
            saved = False
        with self._changed:
            self._error = error
            if saved:
                # All before the item at which it broke are in, and that item if it was put before
                # the block was written. A broken record's own ticket fails.
                if self._writer.num_put >= self._whole_at:
                    self._broken_at += 1
                self._finished = max(self._finished, min(self._broken_at - 1, self._last))
                for number, uids in self._open:
                    if any(uid in self._writer.refused for uid in uids):
                        self._errors[number] = error
            self._queue.clear()
            self._queue_bytes = 0
            self._changed.notify_all()

    def _report_dropped(self) -> None:
        """Leaves a note for the manifest."""
        if self._dropped:
            path = self._writer.folder / f"{self._writer.series}{DROPPED_SUFFIX}"
            write_atomically(path, json.dumps({"uids": self._dropped}).encode())


def record_bytes(record: Trajectory) -> int:
    """Memory that a record takes, to a good approximation."""
    size = record.prompt_ids.nbytes + record.tokens.nbytes + record.commit_step.nbytes
    for array in (record.given, record.superseded, *record.signals.values()):
        size += 0 if array is None else array.nbytes
    if record.features is not None:
        size += record.features.nbytes
    return size + _RECORD_OVERHEAD
