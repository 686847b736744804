"""Writes the rollouts of every RL step to trajectory shards, from which a run can be replayed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

from lit_dlm.callbacks.adapter_checkpoint import require_no_former_run
from lit_dlm.callbacks.record_shards import RecordShards, describe_run
from lit_dlm.ops.options import of_kind
from lit_dlm.rl.module import TraceRLModule
from lit_dlm.rl.rollout import rl_step_of
from lit_dlm.trajectories.store.files import MANIFEST_FILE, completed_uids

logger = logging.getLogger(__name__)


class RolloutWriter(Callback):
    """Keeps all rollouts, dropped groups included, with reward, RL step and policy version.

    ``RolloutDataModule`` with ``source: shards`` trains on what is written here. A thread encodes
    and writes beside the updates, one shard per RL step and process, which is on disk before the
    step's checkpoint. Of what the folder holds, a resumed run keeps the RL steps that its
    checkpoint has behind it and writes the others anew, so the folder is that of one run. A run
    that begins anew wants a folder without rollouts, save those of a run that was cut short before
    its first checkpoint, which it replaces. Nothing is written with ``source: shards``, whose
    rollouts are stored already.

    Args:
        folder: folder of the trajectory set.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)
        self._is_replay = False
        self._shards: RecordShards | None = None

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        of_kind(pl_module, TraceRLModule, option="model")
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        self._is_replay = data.source == "shards"
        if self._is_replay:
            logger.info("RolloutWriter: writes nothing, the rollouts are those of %s", data.shards)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: Any) -> None:
        if not self._is_replay:
            self._first_new_step(trainer, pl_module)  # refuses before time is spent

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if self._is_replay:
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
        """The RL step from which on rollouts in the folder are replaced."""
        if trainer.ckpt_path is not None:
            return pl_module.progress.step
        if held := completed_uids(self.folder):
            # Without checkpoints nobody can go on with them.
            is_finished = (self.folder / MANIFEST_FILE).exists() or not trainer.checkpoint_callbacks
            count = len(held)
            require_no_former_run(trainer, self.folder, "rollouts", count, is_finished=is_finished)
        return 0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        if self._is_replay:
            return
        assert self._shards is not None
        own = [
            record
            for record in pl_module.current.records
            if record.meta["prompt"] % trainer.world_size == trainer.global_rank
        ]
        self._shards.put_records(own, getattr(pl_module.backbone, "vision", None))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self._shards is not None:
            self._shards.flush()  # no checkpoint may be ahead of its rollouts

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self._shards is not None:
            shards, self._shards = self._shards, None
            shards.close(trainer)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        if self._shards is not None:
            shards, self._shards = self._shards, None
            shards.close_after(exception)
