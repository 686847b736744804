"""Writes records in a thread, so that a decode loop waits neither for zstd nor for the disk.

One thread per process takes records from a queue that is bounded in bytes and runs a
:class:`TrajectoryShardWriter`. Encoding and hashing release the interpreter lock. Blocks that are
waiting together share one wait for the disk.

Nothing is lost in silence. A full queue makes :meth:`BackgroundWriter.put` wait; an error of the
thread ends it and is raised by the next ``put``, by ``flush`` and by ``close``; what was written
before the error is finished as far as the disk allows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.store.writer import TrajectoryShardWriter, record_bytes

logger = logging.getLogger(__name__)

Source = Trajectory | Callable[[], Iterable[Trajectory]]

_GROUP_BYTES = 8 * 2**20  # taken from the queue at a time: they share one wait for the disk
_WAKE_SECONDS = 1.0  # how often an idle thread looks whether the program has ended


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
        self._queue: deque[tuple[Source, int]] = deque()
        self._queue_bytes = 0
        self._changed = threading.Condition()
        self._num_queued = 0
        self._num_finished = 0  # so many of them, in order, can be read
        self._num_wanted = 0  # somebody waits for so many of them
        self._is_idle = False
        self._error: BaseException | None = None
        self._was_raised = False
        self._closing = False
        # No daemon: a program that forgets to close ends with its shards finished.
        self._thread = threading.Thread(target=self._run, name="trajectory-writer")
        self._thread.start()

    def __enter__(self) -> BackgroundWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put(self, record: Trajectory) -> None:
        """Queues one record, which the thread checks; it must not be changed any more.

        Raises:
            ValueError: After ``close``.
            BaseException: What broke the thread since the last call.
        """
        self._enqueue(record, record_bytes(record))

    def put_batch(self, make: Callable[[], Iterable[Trajectory]], *, nbytes: int) -> None:
        """Queues records that the thread itself makes, such as those of a captured batch.

        Args:
            make: called once, in the thread.
            nbytes: memory that waits with it.

        Errors are those of :meth:`put`.
        """
        self._enqueue(make, nbytes)

    def flush(self) -> None:
        """Waits until everything put so far is synchronised, renamed and has its side file.

        Raises:
            BaseException: What broke the thread.
        """
        with self._changed:
            wanted = self._num_wanted = self._num_queued
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._num_finished >= wanted or self._error is not None)
            if self._num_finished < wanted and self._error is not None:
                raise self._error

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

    def _enqueue(self, source: Source, nbytes: int) -> None:
        with self._changed:
            self._check_open()
            begin = time.monotonic()
            while self._queue_bytes > 0 and self._queue_bytes + nbytes > self.max_queue_bytes:
                self._changed.wait()
                self._check_open()
            self.blocked_seconds += time.monotonic() - begin
            self._num_queued += 1
            self._queue.append((source, nbytes))
            self._queue_bytes += nbytes
            if self._is_idle:
                self._changed.notify_all()

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closing:
            raise ValueError(f"{self._writer.folder}: the writer is closed")

    # -- the thread's side ---------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._write_queue():
                pass
            self._writer.close()
        except BaseException as error:  # whatever it is belongs to the caller, not to this thread
            try:
                self._writer.close()
            except BaseException as failure:  # the first error is the one to report
                is_ours = not isinstance(failure, OSError)
                logger.error(
                    "%s: the last shard could not be finished (%s)",
                    self._writer.folder,
                    failure,
                    exc_info=is_ours,
                )
            with self._changed:
                self._error = error
                self._queue.clear()
                self._queue_bytes = 0
                self._changed.notify_all()
        else:
            with self._changed:
                self._num_finished = self._num_queued
                self._changed.notify_all()

    def _write_queue(self) -> bool:
        """Waits for work and writes some; ``False`` when all is written and the writer closes."""
        with self._changed:
            if not (self._queue or self._closing or self._num_wanted > self._num_finished):
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
                size += group[-1][1]
            num_handled = self._num_queued - len(self._queue)
            is_last = self._closing and not self._queue
            wanted = self._num_wanted
        for source, _ in group:
            for record in [source] if isinstance(source, Trajectory) else source():
                self._writer.put(record, check=False)
        due = self._writer.seconds_left()
        if due is not None and due <= 0:
            self._writer.flush()
        self._writer.sync()
        if self._num_finished < wanted <= num_handled:
            self._writer.finish_shard()
        with self._changed:
            self._queue_bytes -= size
            if self._writer.num_open == 0:
                self._num_finished = num_handled
            self._changed.notify_all()
        return not is_last
