"""Grades decoded batches beside the decode loop and writes the results as they come."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from rich.console import Console

from lit_dlm.grading import Verdict
from lit_dlm.modules.decode import DecodedBatch, DecodeModule
from lit_dlm.reports import ResultFolder, ResultRow, summarise_folder
from lit_dlm.reports.command import write_report
from lit_dlm.tasks import PromptExample, Task

logger = logging.getLogger(__name__)


class ResultWriter(BasePredictionWriter):
    """Writes one JSON line per sample, and at the end a summary, a table and a plot.

    Grading runs in threads (each grades in its own child process where code is executed), so it
    overlaps with decoding. A completion that several methods share is graded once.

    Args:
        run_dir: folder of the run; results go to ``{run_dir}/results``.
        num_workers: grading threads.
        order: method names in the order wanted in tables; the module's order by default.
    """

    def __init__(
        self, run_dir: str, *, num_workers: int = 1, order: list[str] | None = None
    ) -> None:
        super().__init__(write_interval="batch")
        if num_workers < 1:
            raise ValueError(f"num_workers: expected at least 1, got {num_workers}")
        self.run_dir = Path(run_dir)
        self.results = ResultFolder(self.run_dir / "results")
        self.num_workers = num_workers
        self.order = order
        self._pool: ThreadPoolExecutor | None = None
        self._verdicts: dict[tuple[str, str], Future[Verdict]] = {}
        self._pending: list[tuple[DecodedBatch, list[Future[Verdict]]]] = []
        self._rank = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Claims the result folders, so that other settings are refused before any work."""
        if stage != "predict":
            return
        if not isinstance(pl_module, DecodeModule):
            raise ValueError(f"model: expected a DecodeModule, got {type(pl_module).__name__}")
        self._rank = trainer.global_rank
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
        tasks: list[Task] = datamodule.tasks
        methods = datamodule.methods or list(pl_module.decoders)
        if trainer.is_global_zero:
            for task in tasks:
                for method in methods:
                    if method in pl_module.decoders:
                        settings = self._settings(pl_module, datamodule, task, method)
                        self.results.claim(task.name, method, settings)
        self._pool = ThreadPoolExecutor(self.num_workers, thread_name_prefix="grading")

    @staticmethod
    def _settings(module: DecodeModule, datamodule: Any, task: Task, method: str) -> dict[str, Any]:
        describe = getattr(module.backbone, "describe", None)
        return {
            "backbone": describe() if describe else type(module.backbone).__name__,
            "decoder": module.decoders[method].describe(),
            "response_length": datamodule.response_length,
            "seed": module.seed,
            "split": task.split,
            "tokenizer": module.tokenizer_path,
        }

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
        """Hands a batch to the graders and writes every batch whose grades are complete."""
        assert self._pool is not None
        assert isinstance(prediction, DecodedBatch)
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
        futures = [
            self._grade(datamodule.task(example.task), example, completion)
            for example, completion in zip(prediction.examples, prediction.completions, strict=True)
        ]
        prediction.trajectories = []
        self._pending.append((prediction, futures))
        while self._pending and all(future.done() for future in self._pending[0][1]):
            self._write_first()

    def _grade(self, task: Task, example: PromptExample, completion: str) -> Future[Verdict]:
        assert self._pool is not None
        key = (example.uid, completion)
        if key not in self._verdicts:
            self._verdicts[key] = self._pool.submit(task.grade, example, completion)
        return self._verdicts[key]

    def _write_first(self) -> None:
        decoded, futures = self._pending[0]
        verdicts = [future.result() for future in futures]
        self.results.append(
            [_row(decoded, number, verdict) for number, verdict in enumerate(verdicts)],
            rank=self._rank,
        )
        self._pending.pop(0)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits for the last grades, then rank 0 writes the summary, the tables and the plot."""
        while self._pending:
            self._write_first()
        trainer.strategy.barrier("results")
        if trainer.is_global_zero:
            assert isinstance(pl_module, DecodeModule)
            self.report(self.order or list(pl_module.decoders))

    def report(self, order: Sequence[str] = ()) -> None:
        """Writes ``summary.json``, ``summary.md`` and ``front.png`` and prints the tables."""
        summaries = summarise_folder(self.results.folder, order)
        if not summaries:
            logger.warning("%s: no results to report", self.results.folder)
            return
        write_report(summaries, self.run_dir, Console())

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stops the grading threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Keeps what is already graded when the run breaks off."""
        while self._pending and all(
            future.done() and future.exception() is None for future in self._pending[0][1]
        ):
            self._write_first()
        self.teardown(trainer, pl_module, "predict")


def _row(decoded: DecodedBatch, number: int, verdict: Verdict) -> ResultRow:
    example, result = decoded.examples[number], decoded.result
    return ResultRow(
        uid=example.uid,
        task=example.task,
        method=decoded.method,
        correct=verdict.is_correct,
        verdict=verdict.status,
        detail=verdict.detail,
        answer=verdict.answer,
        completion=decoded.completions[number],
        nfe=int(result.num_steps[number]),
        policy_forwards=int(result.policy_forwards[number]),
        idle_steps=int(result.idle_steps[number]),
        stalled_steps=int(result.stalled_steps[number]),
        num_tokens=decoded.num_tokens[number],
        response_length=result.ids.shape[1] - result.start,
        seconds=float(result.seconds[number]),
        status=result.status[number],
        seed=int(result.seeds[number]),
    )
