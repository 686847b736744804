"""Writes the trajectories of a predict loop to shards, one series per process."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lit_dlm.callbacks.grading_queue import GradedWriter, GradingQueue
from lit_dlm.callbacks.trajectory_folder import TrajectoryFolder, require_all
from lit_dlm.grading import Verdict
from lit_dlm.modules.decode import DecodedBatch, DecodeModule
from lit_dlm.trajectories.store import completed_uids

logger = logging.getLogger(__name__)


class ShardWriter(GradedWriter):
    """Puts the captured records of every batch into the shards of this process.

    A thread encodes and writes them beside the decode. What a killed run left in the folder is
    recovered first. Records whose uid the folder holds already are left out, so a restart never
    writes one twice.

    Args:
        folder: folder of the trajectory set.
        name: name of the set, of a-z, 0-9, ``_`` and ``-``; begins every file name.
        split: split of the set, of a-z, 0-9 and ``_``.
        records_per_block: records per block.
        level: zstd level of records.
        grade: grade every completion and store ``correct`` with the record, and ``score`` where
            the grader gives partial credit.
        num_workers: grading threads.
        max_gigabytes: stop the run with an error when the folder has grown beyond this; ``None``
            for no limit.
    """

    def __init__(
        self,
        folder: str,
        *,
        name: str = "trajectories",
        split: str = "train",
        records_per_block: int = 64,
        level: int = 9,
        grade: bool = False,
        num_workers: int = 1,
        max_gigabytes: float | None = None,
    ) -> None:
        super().__init__()
        if max_gigabytes is not None and max_gigabytes <= 0:
            raise ValueError(f"max_gigabytes: expected a positive number, got {max_gigabytes}")
        self.folder = Path(folder)
        self._options: dict[str, Any] = {
            "name": name,
            "split": split,
            "records_per_block": records_per_block,
            "level": level,
            "max_gigabytes": max_gigabytes,
        }
        self.grade = grade
        self.num_workers = num_workers

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Recovers the folder on rank 0 and opens this process's writer."""
        if stage != "predict":
            return
        super().setup(trainer, pl_module, stage)
        if not isinstance(pl_module, DecodeModule):
            raise ValueError(f"model: expected a DecodeModule, got {type(pl_module).__name__}")
        if self.grade:
            tasks = trainer.datamodule.tasks  # type: ignore[attr-defined]
            self._queue = GradingQueue(
                {task.name: task for task in tasks}, num_workers=self.num_workers
            )
        self._target = TrajectoryFolder(self.folder, trainer, pl_module, **self._options)

    def write(self, decoded: DecodedBatch, verdicts: list[Verdict] | None) -> None:
        """Queues the records of one batch.

        Raises:
            RuntimeError: If the folder has reached ``max_gigabytes``.
            BaseException: What broke the writer since the last batch.
        """
        assert self._target is not None
        facts = None if verdicts is None else [grade_facts(verdict) for verdict in verdicts]
        self._target.put(decoded, facts)

    def finish(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuses to end where samples were lost."""
        if trainer.is_global_zero:
            require_all(trainer, completed_uids(self.folder), self.folder)


def grade_facts(verdict: Verdict) -> dict[str, Any]:
    """What a record says about its grade."""
    facts: dict[str, Any] = {"correct": verdict.is_correct}
    return facts if verdict.score is None else {**facts, "score": verdict.score}
