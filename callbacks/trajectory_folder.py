"""The part of one process in writing the trajectories of a predict loop to a folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lit_dlm.modules.decode import DecodedBatch, DecodeModule
from lit_dlm.modules.generate import TraceModule
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.store import (
    BackgroundWriter,
    TrajectoryShardWriter,
    completed_uids,
    drop_shards,
    merge_manifest,
    recover,
)
from lit_dlm.trajectories.store.provenance import (
    SAMPLE_SEED_RULE,
    RunRecord,
    hardware_facts,
    tokenizer_digest,
)
from lit_dlm.vision.pictures import PICTURES, PictureFolder

logger = logging.getLogger(__name__)


class TrajectoryFolder:
    """Recovers a folder, writes this process's records in a thread, and merges the manifest.

    Records whose uid the folder holds already are left out, so a restart never writes one twice.
    """

    def __init__(
        self,
        folder: str | Path,
        trainer: Trainer,
        module: DecodeModule,
        *,
        name: str,
        split: str,
        max_gigabytes: float | None = None,
        is_stale: Callable[[str], bool] | None = None,
        **options: Any,
    ) -> None:
        """Prepares the folder; all processes must call it.

        Args:
            folder: folder of the trajectory set.
            trainer: the running trainer.
            module: what decodes.
            name: name of the set, begins every file name.
            split: split of the set.
            max_gigabytes: stop with an error when the folder has grown beyond this.
            is_stale: of which uids what the folder holds is deleted, to be written anew; by default
                of none.
            **options: further options of :class:`TrajectoryShardWriter`.

        Raises:
            ValueError: If the folder belongs to a run with other settings, or a shard holds stale
                records and others.
            OSError: If it cannot be written.
        """
        self.folder = Path(folder)
        run = run_record(trainer, module)
        if trainer.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            run.save(self.folder)
            recover(self.folder)
            dropped = 0 if is_stale is None else drop_shards(self.folder, is_stale)
            if dropped:
                logger.warning("%s: deleted %d records, to be made anew", self.folder, dropped)
        trainer.strategy.barrier("shards_recovered")
        self.held = completed_uids(self.folder)
        """Uids that the folder held when this run began."""
        budget = None
        if max_gigabytes is not None:
            size = sum(path.stat().st_size for path in self.folder.glob("*.tar"))
            budget = int((max_gigabytes * 1e9 - size) / trainer.world_size)
        # No process may start a shard while another still counts what the folder holds.
        trainer.strategy.barrier("shards_counted")
        self._pictures = PictureFolder(self.folder / PICTURES)
        self._vision: Any = getattr(module.backbone, "vision", None)
        self._writer = BackgroundWriter(
            TrajectoryShardWriter(
                self.folder,
                name=name,
                split=split,
                rank=trainer.global_rank,
                run=run,
                max_total_bytes=budget,
                **options,
            )
        )
        if trainer.is_global_zero:
            logger.info("Trajectories go to %s", self.folder)

    def put(self, decoded: DecodedBatch, facts: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Queues the records of a batch; the thread makes them from what was captured.

        Args:
            decoded: a batch that was captured.
            facts: small JSON values per row, added to the records.

        Raises:
            ValueError: If the batch carries no trajectories.
            BaseException: What broke the writer since the last call.
        """
        if decoded.captured is None:
            raise ValueError(
                "the prediction carries no trajectories; use a module that captures them (level)"
            )
        uids = [decoded.uid(row) for row in range(len(decoded.examples))]
        left = self._not_held(uids)
        if not left:
            return
        for row in left:
            for picture in decoded.examples[row].images:
                self._pictures.put(picture)

        def make() -> list[Trajectory]:
            records = [decoded.trajectories[row] for row in left]
            if facts is None:
                return records
            return [
                record.with_meta(**facts[row]) for row, record in zip(left, records, strict=True)
            ]

        self._writer.put_batch(make, nbytes=decoded.captured.nbytes)

    def _not_held(self, uids: Sequence[str]) -> list[int]:
        """Numbers of the uids that the folder did not hold when the run began."""
        left = [row for row, uid in enumerate(uids) if uid not in self.held]
        if len(left) < len(uids):
            one = next(uid for uid in uids if uid in self.held)
            logger.warning(
                "%s (and %d more) is in %s already, left out",
                one,
                len(uids) - len(left) - 1,
                self.folder,
            )
        return left

    def put_records(self, records: Sequence[Trajectory]) -> None:
        """Queues records; those that the folder held when the run began are left out.

        They must not be changed any more.

        Raises:
            BaseException: What broke the writer since the last call.
        """
        for row in self._not_held([record.uid for record in records]):
            for digest in records[row].meta.get("images", ()):
                self._pictures.put(self._vision.known_picture(digest))
            self._writer.put(records[row])

    def flush(self) -> None:
        """Waits until everything queued is in finished shards.

        Raises:
            BaseException: What broke the writer.
        """
        self._writer.flush()

    def close(self, trainer: Trainer) -> None:
        """Finishes the shards; when all processes have, the first merges the manifest.

        Raises:
            BaseException: What broke the writer.
        """
        self._writer.close()
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

    def break_off(self, exception: BaseException) -> None:
        """Finishes the shards of a run that broke off; never hides what broke it."""
        try:
            self._writer.close()
        except BaseException as error:  # the run ends with its own exception, this one is logged
            if error is not exception:
                is_ours = not isinstance(error, OSError)
                logger.error(
                    "%s: not all trajectories could be written (%s)",
                    self.folder,
                    error,
                    exc_info=is_ours,
                )


def require_all(trainer: Trainer, done: Collection[str], folder: Path) -> None:
    """Refuses to end a run that has lost some of its samples; for the first process.

    Nothing is asked of a run that was to decode a part only, or whose data are not our own.
    ``done`` are the keys of the decodes in the folder.

    Raises:
        ValueError: some are missing.
    """
    wanted = getattr(getattr(trainer, "datamodule", None), "wanted", None)
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


def run_record(trainer: Trainer, module: DecodeModule) -> RunRecord:
    """What makes the trajectories of a predict run; collective, the same on all processes.

    The first process hashes the weight files, which may be many gigabytes, and tells the others.
    """
    text = _describe_run(trainer, module).text() if trainer.is_global_zero else ""
    return RunRecord.parse(trainer.strategy.broadcast(text))


def _describe_run(trainer: Trainer, module: DecodeModule) -> RunRecord:
    datamodule: Any = getattr(trainer, "datamodule", None)
    describe = getattr(module.backbone, "describe", None)
    spec = module.backbone.spec
    methods = getattr(datamodule, "methods", None) or list(module.decoders)
    capture: dict[str, Any] = {"level": module.level}
    if isinstance(module, TraceModule):
        capture |= {
            "step_ratio": module.step_ratio,
            "scheme": module.scheme,
            "layout": module.settings.layout,
            "hidden_layers": list(module.settings.hidden_layers),
        }
    return RunRecord(
        model=dict(describe()) if describe else {"class": type(module.backbone).__name__},
        tokenizer={
            "path": module.tokenizer_path,
            "digest": tokenizer_digest(module.tokenizer),
            **({"chat_template": module.chat_template} if module.chat_template else {}),
            "mask_id": spec.mask_id,
            "pad_id": spec.pad_id,
            "eos_ids": list(spec.eos_ids),
        },
        decode={
            "methods": {name: module.decoders[name].describe() for name in methods},
            "response_length": getattr(datamodule, "response_length", None),
            "capture": capture,
            **({"chat_template": module.chat_template} if module.chat_template else {}),
        },
        randomness={
            "seed": module.seed,
            "sample_seed": SAMPLE_SEED_RULE,
            "noise": "splitmix64 of (sample seed, stream, step, position, token)",
        },
        data={
            "tasks": {
                task.name: {
                    "split": task.split,
                    **({"template": task.template} if task.template else {}),
                }
                for task in getattr(datamodule, "tasks", ())
            },
            "assignment": getattr(datamodule, "assignment", None),
        },
        hardware={
            **hardware_facts(),
            "world_size": trainer.world_size,
            "batch_size": getattr(datamodule, "batch_size", None),
        },
    )
