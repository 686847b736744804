"""Writes records in a thread: encoding and hashing release the GIL.

A decode loop waits neither for zstd nor for the disk, only for room in a queue of bounded bytes.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import pyarrow as pa

from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.store.files import tar_members
from lit_dlm.trajectories.store.writer import TrajectoryShardWriter, record_bytes

logger = logging.getLogger(__name__)

_GROUP_BYTES = 8 * 2**20  # taken from the queue at a time: they share one wait for the disk
_WAKE_SECONDS = 1.0  # how often an idle thread checks whether the program has ended

Make = Callable[[], Iterable[Trajectory]]


class BackgroundWriter:
    """Writes records to shards in a thread of its own."""

    max_queue_bytes = 256 * 2**20
    """Memory that queued records, and those being written, may take; ``put`` waits beyond it. One
    larger item is accepted when nothing else is queued."""

    def __init__(self, writer: TrajectoryShardWriter) -> None:
        """Starts the thread, which alone may use ``writer`` from now on."""
        self.blocked_seconds = 0.0  # how long put waited for room, in all
        self._writer = writer
        self._writer.sync_blocks = False  # one wait for the disk serves a whole group
        # Functions that make records, with their bytes; an event to set when everything before it
        # is in finished shards; None at the end. The bound is in bytes, which Queue cannot count.
        self._queue: queue.Queue[tuple[Make, int] | threading.Event | None] = queue.Queue()
        self._queue_bytes = 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._is_closed = False
        # No thread can import once the program has ended: Arrow and WebDataset must be there.
        pa.array([])
        tar_members("", {})
        atexit.register(self._tell_unclosed)
        # Not a daemon: a program that forgets to close it still finishes its shards.
        self._thread = threading.Thread(target=self._run, name="trajectory-writer")
        self._thread.start()

    def put(self, record: Trajectory) -> None:
        """Queues one record, which the thread checks; it must not be changed afterwards.

        This and the other methods raise the error that stopped the thread.
        """
        self.put_batch(lambda: [record], nbytes=record_bytes(record))

    def put_batch(self, make: Make, *, nbytes: int) -> None:
        """Queues records that ``make`` returns in the thread, such as those of a captured batch.

        ``nbytes`` of memory are held until then.
        """
        begin = time.monotonic()
        with self._changed:
            self._wait_until(
                lambda: not self._queue_bytes or self._queue_bytes + nbytes <= self.max_queue_bytes
            )
            self._queue_bytes += nbytes
            self._queue.put((make, nbytes))
        self.blocked_seconds += time.monotonic() - begin

    def flush(self) -> None:
        """Waits until everything put so far is synchronised, renamed and has its side file."""
        done = threading.Event()
        self._queue.put(done)
        with self._changed:
            self._wait_until(done.is_set)

    def close(self) -> None:
        """Writes what is queued, finishes the shard and joins the thread; may be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self._tell_unclosed)
        self._queue.put(None)
        self._thread.join()
        if self.blocked_seconds > 0.5:
            message = "%s: decoding waited %.1f s for the writer of trajectories"
            logger.warning(message, self._writer.folder, self.blocked_seconds)
        if self._error is not None:
            raise self._error

    def _tell_unclosed(self) -> None:
        """Logs the error when a program ends without closing, as nothing else will raise it."""
        lost = "" if self._error is None else f"; records are lost: {self._error}"
        logger.error("%s: the writer was never closed%s", self._writer.folder, lost)

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        """Waits for the thread, and raises the error that stopped it."""
        while self._error is None and self._thread.is_alive() and not is_done():
            self._changed.wait(_WAKE_SECONDS)
        if self._error is not None:
            raise self._error
        if self._is_closed:
            raise ValueError(f"{self._writer.folder}: the writer is closed")

    # -- the thread's side ---------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._write_group():
                pass
            self._writer.close()
        except BaseException as error:  # whatever it is belongs to the caller, not to this thread
            # Before the caller hears of it: what was accepted should be on disk by then.
            try:
                self._writer.close()
            except BaseException as failure:  # the first error is the one to report
                logger.error("%s: the last shard is not finished: %s", self._writer.folder, failure)
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _write_group(self) -> bool:
        """Waits for work and writes some; returns ``False`` when nothing more will come."""
        group, size, mark = self._take()
        refused: ValueError | None = None
        try:
            self._put_together(group)
        except ValueError as error:  # the valid records of the group go to the disk first
            refused = error
        due = self._writer.seconds_left()
        if due is not None and due <= 0:
            self._writer.flush()
        self._writer.sync()
        if refused is not None:
            raise refused
        if isinstance(mark, threading.Event):  # readers see finished shards alone
            self._writer.finish_shard()
            mark.set()
        # Only now is there room again: until it is on disk, the group takes memory.
        with self._changed:
            self._queue_bytes -= size
            self._changed.notify_all()
        return mark is not None

    def _put_together(self, group: Sequence[Make]) -> None:
        """Makes the records of a group and puts all at once, which checks them faster."""
        records: list[Trajectory] = []
        try:
            for make in group:
                records += make()
        finally:  # also if a later one cannot be made
            self._writer.put(*records)

    def _take(self) -> tuple[list[Make], int, threading.Event | bool | None]:
        """What to write together, its bytes, and what follows: an event, or ``None`` at the end."""
        group: list[Make] = []
        size = 0
        due = self._writer.seconds_left()
        wait = _WAKE_SECONDS if due is None else min(max(due, 0), _WAKE_SECONDS)
        try:
            item = self._queue.get(timeout=wait)
            while isinstance(item, tuple):
                group.append(item[0])
                size += item[1]
                # What is written counts against the queue's bound, so a group must not be the
                # whole queue: putting would wait until all of it is on disk.
                if size >= _GROUP_BYTES:
                    return group, size, True
                item = self._queue.get_nowait()
        except queue.Empty:
            # A program that ended without closing: nothing else will come, and nobody waits.
            is_left = not threading.main_thread().is_alive() and not self._is_closed
            return group, size, None if is_left else True
        return group, size, item
