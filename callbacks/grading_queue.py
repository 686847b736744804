"""Grading beside the decode loop: batches go in, graded batches come out in the same order."""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter

from lit_dlm.callbacks.trajectory_folder import TrajectoryFolder
from lit_dlm.grading import Verdict
from lit_dlm.modules.decode import DecodedBatch
from lit_dlm.ops.options import at_least
from lit_dlm.tasks import PromptExample, Task, require_code_execution

logger = logging.getLogger(__name__)

_NUM_KEPT = 10_000
"""Verdicts that are remembered for equal completions of other methods."""


class GradingQueue:
    """Grades completions in threads; where code is executed, each in its own child process.

    A completion that several methods share is graded once. The records of captured batches are made
    in these threads too.

    Args:
        tasks: the graders, by task name.
        num_workers: threads.
    """

    def __init__(self, tasks: Mapping[str, Task], *, num_workers: int = 1) -> None:
        at_least(1, num_workers=num_workers)
        self.isolation = require_code_execution(tasks.values())
        """What model-written code runs in."""
        self.tasks = tasks
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="grading")
        self._verdicts: OrderedDict[tuple[str, bytes], Future[Verdict]] = OrderedDict()
        self._pending: deque[tuple[DecodedBatch, list[Future[Verdict]], Future[None]]] = deque()

    def submit(self, decoded: DecodedBatch) -> None:
        """Starts to grade a batch."""
        futures = [
            self._grade(example, completion)
            for example, completion in zip(decoded.examples, decoded.completions, strict=True)
        ]
        self._pending.append((decoded, futures, self._pool.submit(_make_records, decoded)))

    def _grade(self, example: PromptExample, completion: str) -> Future[Verdict]:
        """The verdict of an equal completion, which several methods may give, or a new one."""
        key = (example.uid, hashlib.sha256(completion.encode(errors="surrogatepass")).digest())
        if key not in self._verdicts:
            if len(self._verdicts) >= _NUM_KEPT:
                self._verdicts.popitem(last=False)
            task = self.tasks[example.task]
            grade = task.grade if task.is_graded else _ungraded
            self._verdicts[key] = self._pool.submit(grade, example, completion)
        return self._verdicts[key]

    def finished(self, *, wait: bool = False) -> Iterator[tuple[DecodedBatch, list[Verdict]]]:
        """Takes graded batches from the front.

        Args:
            wait: wait for all of them; otherwise stop at the first that is still being graded.

        Yields:
            Each batch with one verdict per example. A grader's error is raised here, and its
            batch stays in the queue.
        """
        while self._pending:
            decoded, futures, records = self._pending[0]
            parts: list[Future[Any]] = [records, *futures]
            if not wait and not all(one.done() and not one.cancelled() for one in parts):
                return
            verdicts = [future.result() for future in futures]
            records.result()
            self._pending.popleft()
            yield decoded, verdicts

    def close(self) -> None:
        """Stops the threads; what has not begun is dropped."""
        self._pool.shutdown(cancel_futures=True)


class GradedWriter(BasePredictionWriter):
    """Writes the batches of a predict loop once they are graded, and their trajectories.

    What a subclass's ``setup`` leaves as ``None`` is not done: without ``_queue`` batches are not
    graded, without ``_target`` they have no trajectories.
    """

    def __init__(self) -> None:
        super().__init__(write_interval="batch")
        self._queue: GradingQueue | None = None
        self._target: TrajectoryFolder | None = None

    def write(self, decoded: DecodedBatch, verdicts: list[Verdict] | None) -> None:
        """Writes a batch, with one verdict per row where batches are graded."""
        raise NotImplementedError

    def finish(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Comes last, when everything is on disk; all processes call it."""

    def write_on_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, prediction: Any, *_: Any
    ) -> None:
        """Hands a batch to the graders and writes every batch whose grades are complete."""
        if self._queue is None:
            self.write(prediction, None)
        else:
            self._queue.submit(prediction)
            self._write_finished()

    def _write_finished(self, *, wait: bool = False) -> None:
        if self._queue is not None:
            for decoded, verdicts in self._queue.finished(wait=wait):
                self.write(decoded, verdicts)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Waits for the last grades and finishes the shards.

        Not in ``on_predict_end``: Lightning skips that where a process has no work left, and all
        processes must meet here.
        """
        if self._queue is None and self._target is None:
            return
        try:
            self._write_finished(wait=True)
        except BaseException as error:  # the threads must be joined whatever happens
            self.on_exception(trainer, pl_module, error)
            raise
        if self._queue is not None:
            self._queue.close()
        target, self._queue, self._target = self._target, None, None
        if target is not None:
            target.close(trainer)
        self.finish(trainer, pl_module)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Keeps what is graded when the run breaks off, and lets the exception go on."""
        try:
            if self._queue is not None:
                self._queue.close()
                self._write_finished()
        except BaseException as error:  # likely what broke the run; the threads must be joined
            if error is not exception:
                is_ours = not isinstance(error, OSError)
                logger.error("graded samples are lost (%s)", error, exc_info=is_ours)
        finally:
            target, self._queue, self._target = self._target, None, None
            if target is not None:
                target.break_off(exception)


def _ungraded(example: PromptExample, completion: str) -> Verdict:
    """What plain prompts get."""
    del example
    return Verdict(status="ungraded", answer=completion)


def _make_records(decoded: DecodedBatch) -> None:
    """Derives the trajectories of a batch, which the batch then keeps."""
    _ = decoded.trajectories
