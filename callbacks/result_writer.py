"""Grades decoded batches beside the decode loop and writes the results as they come.

Where the module captures its decodes, every row is followed by the trajectory it came from, so that
every number can be replayed. A row is on disk before its trajectory is queued: of the two a killed
run can only lack the trajectory, and such rows are removed and decoded again.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from rich.console import Console

from lit_dlm.callbacks.grading_queue import GradedWriter, GradingQueue
from lit_dlm.callbacks.shard_writer import ShardWriter, grade_facts
from lit_dlm.callbacks.trace_pictures import file_name
from lit_dlm.callbacks.trajectory_folder import TrajectoryFolder, require_all
from lit_dlm.grading import Verdict
from lit_dlm.modules.decode import DecodedBatch, DecodeModule
from lit_dlm.ops.options import at_least
from lit_dlm.reports.command import write_report
from lit_dlm.reports.results import ResultFolder, ResultRow
from lit_dlm.reports.summary import MethodSummary, summarise_folder
from lit_dlm.tasks import Task
from lit_dlm.trajectories.store.provenance import hardware_facts, software_facts
from lit_dlm.vision.pictures import picture_from_text

logger = logging.getLogger(__name__)


class ResultWriter(GradedWriter):
    """Writes one JSON line per sample, and at the end a summary, a table and a plot.

    With ``model.level`` and ``data.trajectories_dir`` set it also writes the trajectory of every
    sample to that folder, with the grade, and the line names it. Pictures that the model draws are
    written as ``{run_dir}/pictures/{method}/{uid}.png`` too.

    Args:
        run_dir: folder of the run; results go to ``{run_dir}/results``.
        num_workers: grading threads.
        order: method names in the order wanted in tables; the module's order by default.
    """

    def __init__(
        self, run_dir: str, *, num_workers: int = 1, order: list[str] | None = None
    ) -> None:
        super().__init__()
        at_least(1, num_workers=num_workers)
        self.run_dir = Path(run_dir)
        self.results = ResultFolder(self.run_dir / "results")
        self.num_workers = num_workers
        self.order = order
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
        self._queue = GradingQueue(
            {task.name: task for task in tasks}, num_workers=self.num_workers
        )
        if trainer.is_global_zero:
            for task in tasks:
                for method in methods:
                    settings = _settings(pl_module, datamodule, task, method)
                    if task.runs_code:
                        settings["isolation"] = self._queue.isolation
                    self.results.claim(task.name, method, settings)
            removed = self.results.drop_doubles()
            if removed:
                logger.warning("%s: removed %d doubled rows", self.results.folder, removed)
            logger.info("Results go to %s", self.results.folder)
        self._target = self._open_trajectories(trainer, pl_module, datamodule.trajectories_dir)

    def _open_trajectories(
        self, trainer: Trainer, module: DecodeModule, folder: str | None
    ) -> TrajectoryFolder | None:
        """The writer of trajectories, if they are wanted; removes rows that lack theirs."""
        if (module.level is None) != (folder is None):
            raise ValueError(
                "trajectories: set both model.level and data.trajectories_dir to keep them, or "
                f"neither; got level {module.level!r} and folder {folder!r}"
            )
        if folder is None:
            return None
        if any(isinstance(callback, ShardWriter) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            raise ValueError(
                "callbacks: ResultWriter writes the trajectories itself, with the grades; "
                "leave ShardWriter out"
            )
        target = TrajectoryFolder(folder, trainer, module, name="benchmark", split="test")
        if trainer.is_global_zero:
            removed = self.results.keep_only(target.held)
            if removed:
                logger.warning("%d results lack their trajectory and are made again", removed)
        trainer.strategy.barrier("results_checked")
        return target

    def write(self, decoded: DecodedBatch, verdicts: list[Verdict] | None) -> None:
        """Appends the rows of a batch, then queues its trajectories."""
        assert verdicts is not None
        assert self._queue is not None
        named: list[dict[str, str] | None] = [None] * len(verdicts)
        if self._target is not None:
            folder = os.path.relpath(self._target.folder, self.run_dir)
            named = [
                {"set": folder, "uid": record.uid, "digest": record.digest().hex()}
                for record in decoded.trajectories
            ]
        soft = {name for name, task in self._queue.tasks.items() if task.is_soft}
        rows = [
            _row(decoded, number, verdict, named[number], soft)
            for number, verdict in enumerate(verdicts)
        ]
        for row in rows:
            if picture := picture_from_text(row.completion):
                path = self.run_dir / "pictures" / file_name(row.method) / file_name(row.uid)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.with_name(path.name + ".png").write_bytes(picture.read())
        self.results.append(rows, rank=self._rank)
        if self._target is not None:
            self._target.put(decoded, [grade_facts(verdict) for verdict in verdicts])

    def finish(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Rank 0 writes the summary, the tables and the plot."""
        trainer.strategy.barrier("results")
        if trainer.is_global_zero:
            assert isinstance(pl_module, DecodeModule)
            summaries = summarise_folder(
                self.results.folder, self.order or list(pl_module.decoders)
            )
            self.results.write_facts(_facts(trainer, pl_module))
            write_report(summaries, self.run_dir, Console())
            _log(trainer, summaries, self.run_dir / "front.png")
            done = {
                f"{uid}@{method}"
                for task, method in self.results.pairs()
                for uid in self.results.completed(task, method)
            }
            require_all(trainer, done, self.results.folder)


def _log(trainer: Trainer, summaries: Sequence[MethodSummary], front: Path) -> None:
    """Gives every logger the numbers of all methods over their steps, the table and the front."""
    if trainer.loggers and summaries:
        # Here: most runs have none, and it imports their packages.
        from lit_dlm.reports.profile import log_profile

        for target in trainer.loggers:
            log_profile(target, summaries, front if front.exists() else None)


def _facts(trainer: Trainer, module: DecodeModule) -> dict[str, Any]:
    """What a reader of the report wants to know, as JSON types."""
    describe = getattr(module.backbone, "describe", dict)
    model: dict[str, Any] = describe()
    software = software_facts()
    return {
        "model": module.tokenizer_path,
        "family": model.get("family"),
        "parameters": model.get("num_parameters"),
        "dtype": model.get("dtype"),
        "seed": module.seed,
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "device": ", ".join(hardware_facts()["devices"]) or f"CPU ({platform.machine()})",
        "processes": trainer.world_size,
        "versions": {
            name: software[name]
            for name in ("lit_dlm", "commit", "torch", "transformers", "python")
            if software[name] is not None
        },
    }


def _settings(module: DecodeModule, datamodule: Any, task: Task, method: str) -> dict[str, Any]:
    """Everything that decides the results of a method on a task."""
    describe = getattr(module.backbone, "describe", None)
    return {
        "backbone": describe() if describe else type(module.backbone).__name__,
        "decoder": module.decoders[method].describe(),
        "response_length": datamodule.response_length,
        "seed": module.seed,
        "split": task.split,
        "tokenizer": module.tokenizer_path,
        **({} if module.cut_at_eos else {"cut_at_eos": False}),
        **({"template": task.template} if task.template else {}),
        **({"chat_template": module.chat_template} if module.chat_template else {}),
    }


def _row(
    decoded: DecodedBatch,
    number: int,
    verdict: Verdict,
    trajectory: dict[str, str] | None,
    soft: Collection[str],
) -> ResultRow:
    """The row of a sample; tasks that are ``soft`` count by the verdict's score."""
    example, result = decoded.examples[number], decoded.result
    fill = None if decoded.fill is None else decoded.fill[number]
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
        policy_seconds=0.0
        if result.policy_seconds is None
        else float(result.policy_seconds[number]),
        trajectory=trajectory,
        fill=None if fill is None else fill.by_name(),
        lockstep=None if fill is None else fill.lockstep_score(),
        prompt=example.text,
        response=example.response,
        score=verdict.score if example.task in soft else None,
    )
