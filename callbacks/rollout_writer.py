"""Writes the rollouts of every RL step to trajectory shards, from which a run can be replayed."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_dlm.callbacks.trajectory_folder import TrajectoryFolder
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
        max_gigabytes: stop the run with an error when the folder has grown beyond this.
    """

    def __init__(self, folder: str, *, max_gigabytes: float | None = None) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.max_gigabytes = max_gigabytes
        self._is_replay = False
        self._target: TrajectoryFolder | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks what is trained.

        Raises:
            ValueError: the data module does not roll out.
        """
        if stage != "fit":
            return
        if not isinstance(pl_module, TraceRLModule):
            raise ValueError(f"model: expected a TraceRLModule, got {type(pl_module).__name__}")
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        self._is_replay = data.source == "shards"
        if self._is_replay:
            logger.info("RolloutWriter: writes nothing, the rollouts are those of %s", data.shards)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuses a folder with rollouts before time is spent on a new run."""
        if not self._is_replay:
            self._first_new_step(trainer, pl_module, completed_uids(self.folder))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Recovers the folder on rank 0 and opens this process's writer.

        Raises:
            ValueError: the run is not resumed, but the folder holds rollouts.
        """
        if self._is_replay:
            return
        assert isinstance(pl_module, TraceRLModule)
        first = self._first_new_step(trainer, pl_module, completed_uids(self.folder))
        trainer.strategy.barrier("rollouts_looked_at")  # before the first process deletes some
        self._target = TrajectoryFolder(
            self.folder,
            trainer,
            pl_module,
            name="rollouts",
            split="train",
            max_gigabytes=self.max_gigabytes,
            is_stale=lambda uid: rl_step_of(uid) >= first,
        )

    def _first_new_step(
        self, trainer: Trainer, pl_module: LightningModule, held: Collection[str]
    ) -> int:
        """The RL step from which on rollouts in the folder are replaced."""
        if trainer.ckpt_path is not None:
            assert isinstance(pl_module, TraceRLModule)
            return pl_module.progress.step
        savers = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
        has_checkpoint = any(any(Path(one.dirpath or "").glob("*.ckpt")) for one in savers)
        is_finished = (self.folder / MANIFEST_FILE).exists()
        if held and (has_checkpoint or is_finished or not savers):
            raise ValueError(
                f"{self.folder}: expected a folder without rollouts, since this run begins anew, "
                f"got {len(held)} of a former one; resume that one with --ckpt_path, choose "
                "another run_dir, or delete the folder"
            )
        return 0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Queues the rollouts of this RL step that were made by this process."""
        if self._is_replay:
            return
        assert self._target is not None
        assert isinstance(pl_module, TraceRLModule)
        assert pl_module.current is not None
        self._target.put_records(
            [
                record
                for record in pl_module.current.records
                if record.meta["prompt"] % trainer.world_size == trainer.global_rank
            ]
        )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finishes a shard: no checkpoint may be ahead of its rollouts."""
        if self._target is not None:
            self._target.flush()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finishes the shards; when all processes have, rank 0 merges the manifest."""
        if self._target is not None:
            target, self._target = self._target, None
            target.close(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Finishes the shards of a run that broke off."""
        if self._target is not None:
            target, self._target = self._target, None
            target.break_off(exception)
