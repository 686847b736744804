"""Writes trajectories of a run, or of every RL step, to shards; each process has its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

from lit_dlm.callbacks.adapter_checkpoint import require_no_former_run
from lit_dlm.predict.decode import DecodedBatch, DecodeModule
from lit_dlm.rl.module import TraceRLModule
from lit_dlm.rl.rollout import rl_step_of
from lit_dlm.system.options import of_kind, refuse
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.store import (
    BackgroundWriter,
    RunRecord,
    TrajectoryShardWriter,
    completed_uids,
    drop_shards,
    merge_manifest,
    recover,
)
from lit_dlm.trajectories.store.files import MANIFEST_FILE
from lit_dlm.trajectories.store.provenance import SAMPLE_SEED_RULE, hardware, tokenizer_digest
from lit_dlm.vision.pictures import PICTURES, PictureFolder

logger = logging.getLogger(__name__)


class RecordShards:
    """Recovers a folder, writes this process's records in a thread, and merges the manifest.

    All processes must create one together. Records whose uid the folder holds already are left out,
    so a restart never writes one twice; those that are ``is_stale`` are deleted first. A folder of
    other settings than those of ``run`` is refused.
    """

    def __init__(
        self,
        folder: str | Path,
        trainer: Trainer,
        run: RunRecord,
        *,
        max_gigabytes: float | None = None,
        is_stale: Callable[[str], bool] | None = None,
        **options: Any,
    ) -> None:
        self.folder = Path(folder)
        self.held: set[str] = set()  # uids that the folder held when this run began
        if trainer.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            run.save(self.folder)  # first: nothing of another run is recovered or deleted
            self.held = recover(self.folder)[1]
            if is_stale is not None and (dropped := drop_shards(self.folder, is_stale)):
                self.held = {uid for uid in self.held if not is_stale(uid)}
                logger.warning("%s: deleted %d records, to be made anew", self.folder, dropped)
            logger.info("Trajectories go to %s", self.folder)
        trainer.strategy.barrier("shards_recovered")
        if not trainer.is_global_zero:
            self.held = completed_uids(self.folder)
        budget = None
        if max_gigabytes is not None:
            size = sum(path.stat().st_size for path in self.folder.glob("*.tar"))
            budget = int((max_gigabytes * 1e9 - size) / trainer.world_size)
            if budget <= 0:
                held = f"the {size / 1e9:.3g} GB that {self.folder} holds"
                refuse("max_gigabytes", f"more than {held}", f"{max_gigabytes:g}")
        # No process may start a shard while another still counts what the folder holds, or the
        # budgets of the two would differ.
        trainer.strategy.barrier("shards_counted")
        self._pictures = PictureFolder(self.folder / PICTURES)
        options |= {"rank": trainer.global_rank, "max_total_bytes": budget, "held": self.held}
        writer = TrajectoryShardWriter(self.folder, run=run, **options)
        self._writer = BackgroundWriter(writer)

    def put_batch(self, decoded: DecodedBatch, metas: Sequence[Mapping[str, Any]] | None) -> None:
        """Queues the records of a captured batch; ``metas`` of each row are added to its own."""
        assert decoded.captured is not None
        rows = [row for row in range(len(decoded.examples)) if decoded.uid(row) not in self.held]
        for row in rows:
            for picture in decoded.examples[row].images:  # before the records that name them
                self._pictures.add(picture)

        def make() -> list[Trajectory]:
            records = decoded.trajectories
            return [records[row].with_meta(**(metas[row] if metas else {})) for row in rows]

        # The thread makes them: deriving records takes longer than the copy of a step.
        if rows:
            self._writer.put_batch(make, nbytes=decoded.captured.nbytes)

    def put_records(self, records: Sequence[Trajectory], vision: Any) -> None:
        """Queues records, which must not change afterwards; ``vision`` holds their pictures."""
        for record in records:
            if record.uid not in self.held:
                for digest in record.meta.get("images", ()):
                    self._pictures.add(vision.known_picture(digest))
                self._writer.put(record)

    def flush(self) -> None:
        """Waits until everything queued is in finished shards."""
        self._writer.flush()

    def close(self, trainer: Trainer) -> None:
        """Finishes the shards; when all processes have, the first merges the manifest."""
        self._writer.close()
        trainer.strategy.barrier("shards_closed")
        if trainer.is_global_zero:
            manifest = merge_manifest(self.folder)
            counts = manifest["num_records"], len(manifest["shards"]), manifest["bytes"] / 1e6
            logger.info("%s: %d trajectories in %d shards, %.1f MB", self.folder, *counts)

    def close_after(self, exception: BaseException) -> None:
        """Finishes the shards of a run that ends with an error; errors in doing so are logged."""
        try:
            self._writer.close()
        except BaseException as error:  # the run ends with its own exception, this one is logged
            if error is not exception:
                message = "%s: not all trajectories could be written (%s)"
                is_ours = not isinstance(error, OSError)
                logger.error(message, self.folder, error, exc_info=is_ours)


def describe_run(trainer: Trainer, module: DecodeModule) -> RunRecord:
    """Describes what makes the decodes of a run: settings, versions and devices."""
    # Only the first hashes the weight files, which may be gigabytes; all must have the same text,
    # since its digest is in their blocks.
    text = _describe(trainer, module).text() if trainer.is_global_zero else ""
    return RunRecord.parse(trainer.strategy.broadcast(text))


def _describe(trainer: Trainer, module: DecodeModule) -> RunRecord:
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    describe = getattr(module.backbone, "describe", None)
    spec = module.backbone.spec
    # Not every data module has these.
    methods = getattr(data, "methods", None) or list(module.decoders)
    template = {"chat_template": module.chat_template} if module.chat_template else {}
    model = dict(describe()) if describe else {"class": type(module.backbone).__name__}
    precision = str(trainer.precision)
    # Weights in half precision decode without autocast, see the engine.
    if precision.endswith("-mixed") and model.get("dtype", "float32") == "float32":
        model["autocast"] = "bfloat16" if precision.startswith("bf16") else "float16"
    return RunRecord(
        model=model,
        tokenizer={
            "path": module.tokenizer_path,
            "digest": tokenizer_digest(module.tokenizer),
            "mask_id": spec.mask_id,
            "pad_id": spec.pad_id,
            "eos_ids": list(spec.eos_ids),
            **template,
        },
        decode={
            "methods": {name: module.decoders[name].describe() for name in methods},
            "response_length": data.response_length,
            "capture": module.describe_capture(),
            **template,
        },
        randomness={
            "seed": module.seed,
            "sample_seed": SAMPLE_SEED_RULE,
            "noise": "splitmix64 of (sample seed, stream, step, position, token)",
        },
        data={
            "tasks": {
                task.name: {"split": task.split}
                | ({"template": task.template} if task.template else {})
                for task in data.tasks
            },
            "assignment": getattr(data, "assignment", None),
        },
        hardware={
            **hardware(),
            "world_size": trainer.world_size,
            "batch_size": getattr(data, "rollout_batch_size", data.batch_size) or data.rows,
        },
    )


class RolloutWriter(Callback):
    """Stores all rollouts, dropped groups included, with reward, RL step and policy version.

    ``RolloutDataModule`` with ``source: shards`` trains on what is written here. A thread encodes
    and writes during the updates, one shard per RL step and process, which is on disk before the
    step's checkpoint. A resumed run keeps the RL steps in the folder that were complete at its
    checkpoint and writes the others anew, so the folder is that of one run. A new run requires a
    folder without rollouts, except those of a run that was cut short before its first checkpoint,
    which it replaces. Nothing is written with ``source: shards``, whose rollouts are stored.
    """

    writes_files = True

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)
        self._shards: RecordShards | None = None

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            of_kind(pl_module, TraceRLModule, option="model")

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if data.source == "shards":
            logger.info("RolloutWriter: writes nothing, the rollouts are those of %s", data.shards)
            return
        first = self._first_new_step(trainer, pl_module)
        trainer.strategy.barrier("rollouts_looked_at")  # before the first process deletes some
        self._shards = RecordShards(
            self.folder,
            trainer,
            describe_run(trainer, pl_module),
            name="rollouts",
            split="train",
            is_stale=lambda uid: rl_step_of(uid) >= first,
        )

    def _first_new_step(self, trainer: Trainer, pl_module: TraceRLModule) -> int:
        """Returns the first RL step whose rollouts in the folder are replaced."""
        if trainer.ckpt_path is not None:
            return pl_module.loop.progress.step
        if held := completed_uids(self.folder):
            # Without checkpoints no run can continue them.
            is_finished = (self.folder / MANIFEST_FILE).exists() or not trainer.checkpoint_callbacks
            count = len(held)
            require_no_former_run(trainer, self.folder, "rollouts", count, is_finished=is_finished)
        return 0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        if self._shards is None:
            return
        own = [
            one.to_record()
            for one in pl_module.loop.current.rollouts
            if one.prompt % trainer.world_size == trainer.global_rank
        ]
        self._shards.put_records(own, getattr(pl_module.backbone, "vision", None))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self._shards is not None:
            self._shards.flush()  # no checkpoint may be ahead of its rollouts

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self._shards is not None:
            self._shards.close(trainer)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        if self._shards is not None:
            self._shards.close_after(exception)
