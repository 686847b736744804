"""Grades completions in threads beside the decode loop; writes results and trajectories."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BasePredictionWriter

from lit_dlm.callbacks.interruption import Interrupted
from lit_dlm.callbacks.record_shards import RecordShards, describe_run
from lit_dlm.callbacks.trace_pictures import file_name
from lit_dlm.config.components import source_digests
from lit_dlm.grading import Verdict
from lit_dlm.predict.decode import DecodedBatch, DecodeModule
from lit_dlm.reports.command import write_report
from lit_dlm.reports.results import ResultFolder, ResultRow
from lit_dlm.reports.summary import MethodSummary, summarise_folder
from lit_dlm.system.files import write_atomically
from lit_dlm.system.options import at_least, of_kind, refuse, within
from lit_dlm.system.terminal import PlainConsole
from lit_dlm.tasks import PromptExample, Task, require_code_execution
from lit_dlm.trajectories.store import RunRecord, TrajectoryShardReader, completed_uids
from lit_dlm.trajectories.store.files import prompt_uid
from lit_dlm.vision.pictures import picture_from_text

logger = logging.getLogger(__name__)

_NUM_KEPT = 10_000  # number of verdicts kept for equal completions of other methods


class GradingQueue:
    """Grades completions in threads; code is executed in child processes, one per completion.

    A completion that several methods share is graded once. Records are made in these threads, too.
    """

    def __init__(self, tasks: Mapping[str, Task], *, num_workers: int = 1) -> None:
        at_least(1, num_workers=num_workers)
        self.isolation = require_code_execution(tasks.values())  # what model-written code runs in
        self.tasks = tasks
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="grading")
        self._verdicts: OrderedDict[tuple[str, bytes], Future[Verdict]] = OrderedDict()
        self._pending: deque[tuple[DecodedBatch, list[Future[Verdict]], Future[Any]]] = deque()

    def submit(self, decoded: DecodedBatch) -> None:
        futures = [
            self._grade(example, completion)
            for example, completion in zip(decoded.examples, decoded.completions, strict=True)
        ]
        self._pending.append((decoded, futures, self._pool.submit(lambda: decoded.trajectories)))

    def _grade(self, example: PromptExample, completion: str) -> Future[Verdict]:
        """Returns the verdict on an equal completion, perhaps of another method, or a new one."""
        # The digest in place of the text: ten thousand keys of long answers would take memory.
        key = (example.uid, hashlib.sha256(completion.encode(errors="surrogatepass")).digest())
        if key not in self._verdicts:
            if len(self._verdicts) >= _NUM_KEPT:
                # Methods follow one another on the same prompts, so the oldest verdict is the least
                # likely one to be asked for.
                self._verdicts.popitem(last=False)
            task = self.tasks[example.task]
            self._verdicts[key] = self._pool.submit(_graded, task, example, completion)
        return self._verdicts[key]

    def finished(self, *, wait: bool = False) -> Iterator[tuple[DecodedBatch, list[Verdict]]]:
        """Removes graded batches, with a verdict per example, from the front of the queue.

        Stops at the first batch that is still being graded, unless told to ``wait``. A grader's
        error is raised here, and its batch stays in the queue.
        """
        while self._pending:
            decoded, futures, records = self._pending[0]
            parts: list[Future[Any]] = [records, *futures]
            # A closed queue has cancelled what had not begun: that never gets a result.
            if not wait and not all(one.done() and not one.cancelled() for one in parts):
                return
            verdicts = [future.result() for future in futures]
            records.result()
            self._pending.popleft()
            yield decoded, verdicts

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def _graded(task: Task, example: PromptExample, completion: str) -> Verdict:
    """Returns a task's verdict on a completion; errors name the sample."""
    if not task.is_graded:
        return Verdict(status="ungraded", answer=completion)
    try:
        return of_kind(task.grade(example, completion), Verdict, option=f"{example.uid}: verdict")
    except Exception as error:
        error.add_note(f"{example.uid}: graded by {type(task).__name__}")
        raise


class DecodeWriter(BasePredictionWriter):
    """Writes what ``predict`` decodes: graded results, trajectories, or both.

    Results are a JSON line per sample, and at the end a summary, a table and a plot; pictures that
    the model draws go to ``{run_dir}/pictures/{method}/{uid}.png``. With both, every line names its
    trajectory, so that every number can be replayed. The data module is told what the folders hold,
    so that a restart, on any number of processes, decodes only what is missing; with both, a sample
    is done once both folders hold it. What a killed run left is recovered first.

    Args:
        run_dir: folder of the run; results go to ``{run_dir}/results``. Without it there are none.
        trajectories_dir: folder of trajectory shards, which need a module that captures
            (``model.level``); by default ``{run_dir}/trajectories`` if the module captures.
        grade: whether to grade where only trajectories are written: each then holds ``correct``,
            and ``score`` where the grader gives partial credit.
        num_workers: grading threads.
        records_per_block: records of a block; a killed run loses at most an unfinished one.
        max_gigabytes: stop the run with an error when the shards have grown beyond this.
    """

    writes_files = True

    def __init__(
        self,
        run_dir: str | None = None,
        *,
        trajectories_dir: str | None = None,
        grade: bool = False,
        num_workers: int = 1,
        records_per_block: int = 64,
        max_gigabytes: float | None = None,
    ) -> None:
        super().__init__(write_interval="batch")
        if run_dir is None and trajectories_dir is None:
            refuse("DecodeWriter", "run_dir, trajectories_dir or both", "none")
        within("(0, inf)", max_gigabytes=max_gigabytes)
        self.results = None if run_dir is None else ResultFolder(Path(run_dir) / "results")
        self.trajectories_dir = None if trajectories_dir is None else Path(trajectories_dir)
        self.grade = grade or run_dir is not None
        self.num_workers = num_workers
        self._options: dict[str, Any] = {
            "name": "decodes",
            "split": "train" if run_dir is None else "test",
            "records_per_block": records_per_block,
            "max_gigabytes": max_gigabytes,
        }
        self._queue: GradingQueue | None = None
        self._shards: RecordShards | None = None
        self._run: RunRecord | None = None

    # -- before the first batch ------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if stage != "predict":
            return
        of_kind(pl_module, DecodeModule, option="model")
        if self.trajectories_dir is not None and pl_module.level is None:
            where = f"one, since trajectories go to {self.trajectories_dir}"
            refuse("model.level", where, "none")
        # Each would tell the data module what is done, and the second would overwrite the first.
        if sum(isinstance(one, DecodeWriter) for one in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            refuse("callbacks", "one DecodeWriter, which can write both", "more")
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        self._rank = trainer.global_rank
        run = self._run = describe_run(trainer, pl_module)
        if self.grade:
            tasks = {task.name: task for task in data.tasks}
            self._queue = GradingQueue(tasks, num_workers=self.num_workers)
        folder = self.trajectories_dir
        if self.results is not None:
            if trainer.is_global_zero:
                self._claim(self.results, run, pl_module, data.tasks)
                skipped = self.results.metadata().get("skipped", {}) | getattr(data, "skipped", {})
                self.results.write_metadata({**_facts(run), "skipped": skipped})
            if folder is None and pl_module.level is not None:
                folder = self.results.folder.parent / "trajectories"
        if folder is not None:
            self._shards = RecordShards(folder, trainer, run, **self._options)
        # The data module makes its loaders after `setup` of callbacks and leaves out what is done.
        data.done = self._held(trainer)
        wanted = set(getattr(data, "wanted", ()))
        if set() < wanted <= set(data.done):
            message = "All %d responses are in %s: nothing is decoded (remove it to start anew)"
            place = folder if self.results is None else self.results.folder
            logger.info(message, len(wanted), place)
        # No process may write before all have listed what the folders hold.
        trainer.strategy.barrier("work_listed")

    def _claim(
        self, results: ResultFolder, run: RunRecord, module: DecodeModule, tasks: Sequence[Task]
    ) -> None:
        """Notes, or compares, all settings that decide the results of each method on each task."""
        assert self._queue is not None
        for task in tasks:
            for method, decoder in run.decode["methods"].items():
                # All that decides a result but the code: another value means another folder.
                settings = {
                    "backbone": run.model,
                    "decoder": decoder,
                    "response_length": run.decode["response_length"],
                    "seed": module.seed,
                    "tokenizer": module.tokenizer_path,
                    **run.data["tasks"][task.name],
                }
                # Left out where it is the default, as in folders that are older than the option.
                if module.chat_template:
                    settings["chat_template"] = module.chat_template
                if not module.cut_at_eos:
                    settings["cut_at_eos"] = False
                if task.runs_code:
                    settings["isolation"] = self._queue.isolation
                if grading := getattr(task, "grading", None):
                    settings["grading"] = grading
                if own := source_digests([task, *module.decoders[method].parts.values()]):
                    settings["sources"] = own
                results.claim(task.name, method, settings)
        logger.info("Results go to %s", results.folder)

    def _held(self, trainer: Trainer) -> Collection[str]:
        """Returns the keys of decodes that are already done; repairs the results first."""
        records = None if self._shards is None else self._shards.held
        results = self.results
        if trainer.is_global_zero:
            if results is not None and (removed := results.repair(records)):
                message = "%s: makes %d results again, which are there twice or lack a trajectory"
                logger.warning(message, results.folder, removed)
            self._require_same_problems(trainer.datamodule.tasks)  # type: ignore[attr-defined]
        trainer.strategy.barrier("results_repaired")
        return records or () if results is None else results.decode_uids()

    def _require_same_problems(self, tasks: Sequence[Task]) -> None:
        """Refuses decodes of problems that are others now, such as those of an edited file."""
        problems = {one.uid: one for task in tasks for one in task.examples()}
        for place, uid, problem in self._decoded():
            now = problems.get(uid)
            if now is not None and problem not in (now.digest, None):  # none in old records
                raise ValueError(
                    f"{place}: holds a decode of another problem under the uid {uid}. "
                    "Use another run_dir, or remove the folder"
                )

    def _decoded(self) -> Iterator[tuple[Path, str, str | None]]:
        """Yields place, prompt's uid and problem's digest of what results or shards hold."""
        if (results := self.results) is not None:
            for task, method in results.pairs():
                for row in results.rows(task, method):
                    yield results.method_folder(task, method), row.prompt_uid, row.problem
        elif self._shards is not None and self._shards.held:
            for record in TrajectoryShardReader(self._shards.folder, features=False):
                yield self._shards.folder, prompt_uid(record.uid), record.meta.get("problem")

    # -- batches ---------------------------------------------------------------------------------

    def write_on_batch_end(
        self, trainer: Trainer, pl_module: Any, prediction: Any, *_: Any
    ) -> None:
        if self._queue is None:
            self._write(prediction, None)
        else:
            # Grading runs beside the next forwards; what is graded by now is written in the order
            # of decoding.
            self._queue.submit(prediction)
            self._write_graded()

    def _write_graded(self, *, wait: bool = False) -> None:
        if self._queue is not None:
            for decoded, verdicts in self._queue.finished(wait=wait):
                self._write(decoded, verdicts)

    def _write(self, decoded: DecodedBatch, verdicts: Sequence[Verdict] | None) -> None:
        if self.results is not None and verdicts is not None:
            self._write_rows(decoded, verdicts)
        # After the rows: a killed run can then only lack records, and rows without a record are
        # found and made again.
        if self._shards is not None:
            grades = None if verdicts is None else [grade_metadata(verdict) for verdict in verdicts]
            self._shards.put_batch(decoded, grades)

    def _write_rows(self, decoded: DecodedBatch, verdicts: Sequence[Verdict]) -> None:
        assert self.results is not None
        rows = [self._row(decoded, number, verdict) for number, verdict in enumerate(verdicts)]
        pictures = self.results.folder.parent / "pictures"
        for row in rows:
            if picture := picture_from_text(row.completion):
                path = pictures / file_name(row.method) / file_name(row.uid)
                write_atomically(path.with_name(path.name + ".png"), picture.read())
        self.results.append(rows, rank=self._rank)

    def _row(self, decoded: DecodedBatch, number: int, verdict: Verdict) -> ResultRow:
        """Returns the row of a sample, which names its record if there is one."""
        assert self._queue is not None
        assert self.results is not None
        trajectory = None
        if self._shards is not None:
            record = decoded.trajectories[number]
            # Relative, so that the run folder can be moved or copied as a whole.
            folder = os.path.relpath(self._shards.folder, self.results.folder.parent)
            trajectory = {"set": folder, "uid": record.uid, "digest": record.digest().hex()}
        example, result = decoded.examples[number], decoded.result
        fill = None if decoded.fill is None else decoded.fill[number]
        seconds = result.policy_seconds
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
            policy_seconds=0.0 if seconds is None else float(seconds[number]),
            trajectory=trajectory,
            fill=None if fill is None else fill.by_name(),
            lockstep=None if fill is None else fill.lockstep_score(),
            prompt=example.text,
            response=example.response,
            problem=example.digest,
            score=verdict.score if self._queue.tasks[example.task].is_soft else None,
        )

    # -- the end ---------------------------------------------------------------------------------

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        # Not in on_predict_end, which Lightning skips where there is no work: all must come here.
        if self._run is None:
            return
        try:
            self._write_graded(wait=True)
        except BaseException as error:  # the threads must be joined whatever happens
            self.on_exception(trainer, pl_module, error)
            raise
        shards = self._shards
        self._stop_grading()
        if shards is not None:
            shards.close(trainer)
        # The first process reads what all have written.
        trainer.strategy.barrier("decodes_written")
        if not trainer.is_global_zero:
            return
        if self.results is None:
            assert shards is not None
            _require_all(trainer, completed_uids(shards.folder), shards.folder)
        else:
            _report(trainer, self.results, list(pl_module.decoders))
            _require_all(trainer, self.results.decode_uids(), self.results.folder)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        shards = self._shards
        try:
            if self._queue is not None:
                # A run that is asked to end keeps what it has decoded. Any other error may be from
                # the graders, so these are not waited for.
                self._write_graded(wait=isinstance(exception, Interrupted))
                self._queue.close()
                self._write_graded()
        except BaseException as error:  # likely what broke the run; the threads must be joined
            if error is not exception:
                is_ours = not isinstance(error, OSError)
                logger.error("graded samples are lost (%s)", error, exc_info=is_ours)
        finally:
            self._stop_grading()
            if shards is not None:
                shards.close_after(exception)

    def _stop_grading(self) -> None:
        if self._queue is not None:
            self._queue.close()
        self._queue, self._shards, self._run = None, None, None


def _report(trainer: Trainer, results: ResultFolder, order: Sequence[str]) -> None:
    run_dir = results.folder.parent
    summaries: Sequence[MethodSummary] = summarise_folder(results.folder, order)
    write_report(summaries, run_dir, PlainConsole())
    if trainer.loggers and summaries:
        # Imported here: most runs have no logger, and this imports the loggers' packages.
        from lit_dlm.reports.profile import log_profile

        front = run_dir / "front.png"
        for target in trainer.loggers:
            log_profile(target, summaries, front if front.exists() else None)


def _require_all(trainer: Trainer, done: Collection[str], folder: Path) -> None:
    """Raises an error at the end of a run that has lost some of its samples.

    Runs that were to decode only a part, or that use another data module, are not checked.
    """
    wanted = getattr(getattr(trainer, "datamodule", None), "wanted", None)
    # A float of 1.0 means all, but the integer 1 means one batch.
    is_part = trainer.limit_predict_batches != 1.0 or isinstance(trainer.limit_predict_batches, int)
    if wanted is None or is_part or trainer.should_stop:
        return
    left = [key for key in wanted if key not in done]
    if left:
        raise ValueError(
            f"{folder}: expected {len(wanted)} samples, got {len(wanted) - len(left)}; "
            f"{left[0]} and {len(left) - 1} more were not decoded by any process (were they dealt "
            "among them twice?); the same command makes them"
        )


def grade_metadata(verdict: Verdict) -> dict[str, Any]:
    """Returns what a record stores of its grade; ``correct`` is ``None`` without a grader."""
    is_graded = verdict.status != "ungraded"
    metadata: dict[str, Any] = {"correct": verdict.is_correct if is_graded else None}
    return metadata if verdict.score is None else {**metadata, "score": verdict.score}


def _facts(run: RunRecord) -> dict[str, Any]:
    """Returns facts about the run for readers of the report, as JSON types."""
    return {
        "model": run.tokenizer["path"],
        "family": run.model.get("family"),
        "parameters": run.model.get("num_parameters"),
        "dtype": run.model.get("dtype"),
        "seed": run.randomness["seed"],
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "device": ", ".join(run.hardware["devices"]) or f"CPU ({run.hardware['machine']})",
        "processes": run.hardware["world_size"],
        "versions": {
            name: run.software[name]
            for name in ("lit_dlm", "commit", "torch", "transformers", "python")
            if run.software[name] is not None
        },
    }
