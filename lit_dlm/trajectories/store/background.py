"""Writes records in a thread, so that a decode loop waits neither for zstd nor for the disk.

One thread per process takes records from a queue that is bounded in bytes. Encoding and hashing
release the interpreter lock. Blocks that are waiting together share one wait for the disk.

Nothing is lost in silence. A full queue makes :meth:`BackgroundWriter.put` wait; an error of the
thread ends it and is raised by the next ``put``, by ``flush`` and by ``close``; what was written
before the error is finished as far as the disk allows.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable

from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.store.writer import TrajectoryShardWriter, record_bytes

logger = logging.getLogger(__name__)

_GROUP_BYTES = 8 * 2**20  # taken from the queue at a time: they share one wait for the disk
_WAKE_SECONDS = 1.0  # how often an idle thread looks whether the program has ended

Make = Callable[[], Iterable[Trajectory]]


class BackgroundWriter:
    """Puts records into shards from a thread of its own."""

    max_queue_bytes = 256 * 2**20
    """Records waiting (being written included) may take this much memory; ``put`` waits beyond it.
    One larger item is accepted when nothing else waits."""

    def __init__(self, writer: TrajectoryShardWriter) -> None:
        """Starts the thread, to which the writer of the shards belongs from now on."""
        self.blocked_seconds = 0.0
        """How long ``put`` waited for room, in all."""
        self._writer = writer
        self._writer.sync_blocks = False
        # Records to make with their bytes; an event to set when all before it is in finished
        # shards; None at the end. Its bound is in bytes, which queues do not count.
        self._queue: queue.Queue[tuple[Make, int] | threading.Event | None] = queue.Queue()
        self._queue_bytes = 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._is_closed = False
        # No daemon: a program that forgets to close ends with its shards finished.
        self._thread = threading.Thread(target=self._run, name="trajectory-writer")
        self._thread.start()

    def __enter__(self) -> BackgroundWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put(self, record: Trajectory) -> None:
        """Queues one record, which the thread checks; it must not be changed any more.

        This and the other calls raise what broke the thread.
        """
        self.put_batch(lambda: [record], nbytes=record_bytes(record))

    def put_batch(self, make: Make, *, nbytes: int) -> None:
        """Queues records that the thread itself makes, such as those of a captured batch.

        Args:
            make: called once, in the thread.
            nbytes: memory that waits with it.
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
        """Writes what is queued, finishes the shard and joins the thread; a second call is free."""
        if self._is_closed:
            return
        self._is_closed = True
        self._queue.put(None)
        self._thread.join()
        if self.blocked_seconds > 0.5:
            logger.warning(
                "%s: decoding waited %.1f s for the writer of trajectories",
                self._writer.folder,
                self.blocked_seconds,
            )
        if self._error is not None:
            raise self._error

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        """Waits for the thread, and raises what broke it."""
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
            try:
                self._writer.close()
            except BaseException as failure:  # the first error is the one to report
                logger.error("%s: the last shard is not finished: %s", self._writer.folder, failure)
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _write_group(self) -> bool:
        """Waits for work and writes some; ``False`` when all is written and the writer closes."""
        group, size, mark = self._take()
        broken: ValueError | None = None
        for make in group:
            for record in make():
                try:
                    self._writer.put(record)
                except ValueError as error:  # costs nobody else
                    broken = broken or error
        due = self._writer.seconds_left()
        if due is not None and due <= 0:
            self._writer.flush()
        self._writer.sync()
        if broken is not None:
            raise broken
        if isinstance(mark, threading.Event):
            self._writer.finish_shard()
            mark.set()
        with self._changed:
            self._queue_bytes -= size
            self._changed.notify_all()
        return mark is not None

    def _take(self) -> tuple[list[Make], int, threading.Event | bool | None]:
        """What is written together, its bytes, and what follows: ``None`` at the end."""
        group: list[Make] = []
        size = 0
        due = self._writer.seconds_left()
        wait = _WAKE_SECONDS if due is None else min(max(due, 0), _WAKE_SECONDS)
        try:
            item = self._queue.get(timeout=wait)
            while isinstance(item, tuple):
                group.append(item[0])
                size += item[1]
                if size >= _GROUP_BYTES:
                    return group, size, True
                item = self._queue.get_nowait()
        except queue.Empty:
            if not threading.main_thread().is_alive() and not self._is_closed:
                logger.error("%s: the writer was never closed", self._writer.folder)
                return group, size, None
            return group, size, True
        return group, size, item
