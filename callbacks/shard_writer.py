"""Writes the trajectories of a predict loop to shards, one series per process."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter

from callbacks.grading_queue import GradingQueue
from lit_dlm.grading import Verdict
from lit_dlm.modules.decode import DecodeModule
from lit_dlm.modules.generate import TraceModule
from lit_dlm.trajectories.provenance import RunRecord, hardware_facts
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.shards import (
    TrajectoryShardWriter,
    completed_uids,
    merge_manifest,
    recover,
)

logger = logging.getLogger(__name__)


class ShardWriter(BasePredictionWriter):
    """Puts ``prediction.trajectories`` of every batch into the shards of this process.

    What a killed run left in the folder is recovered first. Records whose uid the folder holds
    already are left out, so a restart never writes one twice.

    Args:
        folder: folder of the trajectory set.
        name: name of the set, of a-z, 0-9, ``_`` and ``-``; begins every file name.
        split: split of the set, of a-z, 0-9 and ``_``.
        block_size: records per block.
        max_shard_records: close a shard at this many records.
        flush_seconds: finished records wait at most about this long (or one batch) in memory.
        level: zstd level of records.
        grade: grade every completion and store ``correct`` with the record, and ``score`` where
            the grader gives partial credit.
        num_workers: grading threads.
        max_gigabytes: stop the run with an error before the folder grows beyond this; ``None``
            for no limit.
    """

    def __init__(
        self,
        folder: str,
        *,
        name: str = "trajectories",
        split: str = "train",
        block_size: int = 64,
        max_shard_records: int = 4096,
        flush_seconds: float = 30.0,
        level: int = 9,
        grade: bool = False,
        num_workers: int = 1,
        max_gigabytes: float | None = None,
    ) -> None:
        super().__init__(write_interval="batch")
        if max_gigabytes is not None and max_gigabytes <= 0:
            raise ValueError(f"max_gigabytes: expected a positive number, got {max_gigabytes}")
        self.folder = Path(folder)
        self.name = name
        self.split = split
        self.block_size = block_size
        self.max_shard_records = max_shard_records
        self.flush_seconds = flush_seconds
        self.level = level
        self.max_gigabytes = max_gigabytes
        self.grade = grade
        self.num_workers = num_workers
        self._queue: GradingQueue | None = None
        self._writer: TrajectoryShardWriter | None = None
        self._done: set[str] = set()
        self._budget: float | None = None
        self._last_batch = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Recovers the folder on rank 0 and opens this process's writer."""
        if stage != "predict":
            return
        super().setup(trainer, pl_module, stage)
        if not isinstance(pl_module, DecodeModule):
            raise ValueError(f"model: expected a DecodeModule, got {type(pl_module).__name__}")
        run = run_record(trainer, pl_module)
        if trainer.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            run.save(self.folder)
            recover(self.folder)
        trainer.strategy.barrier("shards_recovered")
        self._done = completed_uids(self.folder)
        if self.max_gigabytes is not None:
            held = sum(path.stat().st_size for path in self.folder.glob("*.tar"))
            self._budget = (self.max_gigabytes * 1e9 - held) / trainer.world_size
        # No process may start a shard while another still counts what the folder holds.
        trainer.strategy.barrier("shards_counted")
        self._writer = TrajectoryShardWriter(
            self.folder,
            name=self.name,
            split=self.split,
            rank=trainer.global_rank,
            run=run,
            block_size=self.block_size,
            max_shard_records=self.max_shard_records,
            flush_seconds=self.flush_seconds,
            level=self.level,
        )
        if self.grade:
            tasks = trainer.datamodule.tasks  # type: ignore[attr-defined]
            self._queue = GradingQueue(
                {task.name: task for task in tasks}, num_workers=self.num_workers
            )
        if trainer.is_global_zero:
            logger.info("Trajectories go to %s", self.folder)
        self._last_batch = time.monotonic()

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Puts the records of one batch.

        Raises:
            ValueError: If the prediction carries no trajectories.
            RuntimeError: If the folder reaches ``max_gigabytes``.
        """
        assert self._writer is not None
        records: list[Trajectory] | None = getattr(prediction, "trajectories", None)
        if not records:
            raise ValueError(
                "ShardWriter: the prediction carries no trajectories; use a module that captures "
                "them, and put this callback before others that drop them"
            )
        if self._queue is None:
            self._put(records)
        else:
            self._queue.submit(prediction)
            self._put_graded()
        now = time.monotonic()
        if now - self._last_batch >= self.flush_seconds:
            self._writer.flush()  # the next batch may take as long: do not let records wait for it
        self._last_batch = now
        if self._budget is not None and self._writer.bytes_written > self._budget:
            raise RuntimeError(
                f"max_gigabytes: {self.folder} has reached its limit of {self.max_gigabytes} GB; "
                "what was written is kept, raise the limit to go on"
            )

    def _put(self, records: Sequence[Trajectory]) -> None:
        assert self._writer is not None
        for record in records:
            if record.uid in self._done:
                logger.warning("%s is in %s already, left out", record.uid, self.folder)
                continue
            self._writer.put(record)

    def _put_graded(self, *, wait: bool = False) -> None:
        assert self._queue is not None
        for decoded, verdicts in self._queue.finished(wait=wait):
            self._put(
                [
                    replace(record, meta={**record.meta, **_grade_facts(verdict)})
                    for record, verdict in zip(decoded.trajectories, verdicts, strict=True)
                ]
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Finishes the shards; when all processes have, rank 0 merges the manifest.

        Not in ``on_predict_end``: Lightning skips that where a process has no work left, and all
        processes must meet here.
        """
        if self._writer is None:
            return
        if self._queue is not None:
            self._put_graded(wait=True)
            self._queue.close()
            self._queue = None
        writer, self._writer = self._writer, None
        writer.close()
        trainer.strategy.barrier("shards_closed")
        if trainer.is_global_zero:
            manifest = merge_manifest(self.folder)
            logger.info(
                "%s: %d trajectories in %d shards, %.1f MB",
                self.folder,
                manifest["num_records"],
                len(manifest["shards"]),
                manifest["bytes"] / 1e6,
            )

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Finishes the shards when the run breaks off, and lets the exception go on."""
        if self._writer is None:
            return
        try:
            if self._queue is not None:
                self._queue.close()
                self._put_graded()
            self._writer.close()
        except OSError:
            logger.exception("%s: the last shard could not be finished", self.folder)
        self._queue = self._writer = None


def _grade_facts(verdict: Verdict) -> dict[str, Any]:
    facts: dict[str, Any] = {"correct": verdict.is_correct}
    return facts if verdict.score is None else {**facts, "score": verdict.score}


def run_record(trainer: Trainer, module: DecodeModule) -> RunRecord:
    """What makes the trajectories of a predict run.

    Args:
        trainer: its world size is recorded, and the settings of its data module.
        module: gives backbone, tokenizer, decoders and seed.

    Returns:
        The record of the run.
    """
    datamodule: Any = getattr(trainer, "datamodule", None)
    describe = getattr(module.backbone, "describe", None)
    spec = module.backbone.spec
    capture: dict[str, Any] = {"level": "tokens"}
    if isinstance(module, TraceModule):
        capture = {
            "level": module.level,
            "step_ratio": module.step_ratio,
            "scheme": module.scheme,
            "layout": module.settings.layout,
            "hidden_layers": list(module.settings.hidden_layers),
        }
    return RunRecord(
        model=dict(describe()) if describe else {"class": type(module.backbone).__name__},
        tokenizer={
            "path": module.tokenizer_path,
            "digest": _tokenizer_digest(module.tokenizer),
            "mask_id": spec.mask_id,
            "pad_id": spec.pad_id,
            "eos_ids": list(spec.eos_ids),
        },
        decode={
            "methods": {name: decoder.describe() for name, decoder in module.decoders.items()},
            "response_length": getattr(datamodule, "response_length", None),
            "capture": capture,
        },
        randomness={
            "seed": module.seed,
            "sample_seed": "63 bits of sha256('{seed}:{uid}')",
            "noise": "splitmix64 of (sample seed, stream, step, position, token)",
        },
        data={
            "tasks": [
                {"name": task.name, "split": task.split}
                for task in getattr(datamodule, "tasks", ())
            ],
            "assignment": getattr(datamodule, "assignment", None),
        },
        hardware={
            **hardware_facts(),
            "world_size": trainer.world_size,
            "batch_size": getattr(datamodule, "batch_size", None),
        },
    )


def _tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 over the vocabulary and the chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    template = getattr(tokenizer, "chat_template", None)
    return hashlib.sha256(f"{text}\0{template}".encode()).hexdigest()
