"""Grading beside the decode loop: batches go in, graded batches come out in the same order."""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from lit_dlm.grading import Verdict
from lit_dlm.modules.decode import DecodedBatch
from lit_dlm.ops.options import at_least
from lit_dlm.tasks import PromptExample, Task, require_code_execution

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
        """Takes graded batches, with a verdict per example, from the front.

        Stops at the first that is still being graded, unless it is to ``wait``. A grader's error is
        raised here, and its batch stays in the queue.
        """
        while self._pending:
            decoded, futures, records = self._pending[0]
            parts: list[Future[Any]] = [records, *futures]
            # Those that a closed queue has cancelled never end.
            if not wait and not all(one.done() and not one.cancelled() for one in parts):
                return
            verdicts = [future.result() for future in futures]
            records.result()
            self._pending.popleft()
            yield decoded, verdicts

    def close(self) -> None:
        """Stops the threads; what has not begun is dropped."""
        self._pool.shutdown(cancel_futures=True)


def _ungraded(example: PromptExample, completion: str) -> Verdict:
    """What plain prompts get."""
    del example
    return Verdict(status="ungraded", answer=completion)


def _make_records(decoded: DecodedBatch) -> None:
    """Derives the trajectories of a batch, which the batch then keeps."""
    _ = decoded.trajectories
