"""Reinforcement learning's data: every epoch is one RL step on fresh rollouts.

``train_dataloader`` runs before each epoch, after the strategy has wrapped the model: it calls
:func:`~lit_dlm.rl.step.rl_step` and returns a loader over its batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from datamodules.epoch_plan import ExampleRef, FixedPlan
from datamodules.resuming import place, planned_loader
from datamodules.updates import set_accumulation
from lit_dlm.rewards import RewardModel
from lit_dlm.rl.items import RolloutBatch
from lit_dlm.rl.metrics import RolloutValidation, ValidationBatch
from lit_dlm.rl.module import TraceRLModule
from lit_dlm.rl.progress import RolloutProgress
from lit_dlm.rl.rollout import OnlineRollouts, RolloutSource, StoredRollouts
from lit_dlm.rl.settings import RolloutSettings
from lit_dlm.rl.step import RLProgress, RLStep, rl_step
from lit_dlm.trajectories.record import Trajectory

logger = logging.getLogger(__name__)


class RolloutDataModule(RolloutSettings, LightningDataModule):
    """Rollouts, rewards, filters and training items of RL steps.

    Everything random follows from seeds, names and the number of the RL step, so a run that is
    stopped between two RL steps and resumed goes on as if it had not been.
    """

    _source: RolloutSource | None = None
    _step: RLStep | None = None
    _loader: DataLoader[Any] | None = None
    _is_used = True
    _now = _before = RLProgress()
    validation: RolloutValidation | None = None
    """What scores held-out prompts; ``None`` without such prompts."""

    def setup(self, stage: str | None = None) -> None:
        """Tokenises prompts and prepares engine, rewards and validation.

        Raises:
            ValueError: the module cannot be trained on rollouts, no prompt is short enough, or the
                rows of an update do not divide.
        """
        if self._source is not None or stage not in ("fit", "validate", None):
            return
        module = self._module()
        if stage == "fit":
            set_accumulation(
                self.trainer,
                self.rows_per_update,
                batch_size=self.batch_size,
                packing=module.rows.copies,
            )
        for reward in self.rewards:
            if isinstance(reward, RewardModel) and reward.device is None:
                reward.device = str(self.trainer.strategy.root_device)
        if self.shards is not None:
            self.warn_of_unread()
            self._source = StoredRollouts(self.shards, mask_id=module.backbone.spec.mask_id)
        else:
            self._source = OnlineRollouts.of(module, module.method, self)
        if self.val_tasks:
            self.validation = RolloutValidation.of(module, module.val_methods, self)

    def _module(self) -> TraceRLModule:
        module = self.trainer.lightning_module if self.trainer is not None else None
        if not isinstance(module, TraceRLModule):
            raise ValueError(f"model: expected a TraceRLModule, got {type(module).__name__}")
        return module

    def train_dataloader(self) -> DataLoader[Any]:
        """Runs the part of an RL step before its updates, and returns a loader for these."""
        if self._loader is not None and not self._is_used:
            return self._loader  # Lightning asks twice when it resumes
        module, trainer = self._module(), self.trainer
        assert self._source is not None
        self._step = self._loader = None  # no two RL steps in memory
        with module.generating():
            self._step = rl_step(
                module,
                self._source,
                self.advantage,
                self._now,
                batch_size=self.batch_size,
                accumulate=trainer.accumulate_grad_batches,
                passes=self.passes,
                smoothing=self.smoothing,
                seed=self.seed,
                version=trainer.global_step,
                ranks=module.ranks,
                report=RolloutProgress(trainer, self._now.step),
            )
        self._before, self._now = self._now, self._step.progress
        self._is_used = False
        step = self._step
        self._loader = _loader(lambda refs: step.batch(refs[0].number), len(step.batches))
        return self._loader

    @property
    def records(self) -> list[Trajectory]:
        """Rollouts of the current RL step, those of all processes and of dropped groups too."""
        return [] if self._step is None else self._step.records

    @property
    def facts(self) -> dict[str, float]:
        """What is known of the current RL step, as it is logged."""
        return {} if self._step is None else self._step.facts

    @property
    def step(self) -> int:
        """Number of the RL step that is trained on, from 0."""
        return self._before.step

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Notices that an RL step is trained on."""
        if isinstance(batch, RolloutBatch):
            self._is_used = True
        return batch

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        """Leaves prompts alone: the engine builds its canvas on the device."""
        if isinstance(batch, ValidationBatch):
            return batch
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """Held-out prompts, the same ones with the same noise at every validation."""
        if self.validation is None:
            return []
        rank, world_size = place(self.trainer)
        prompts = self.validation.prompts
        return _loader(
            lambda refs: ValidationBatch(
                [prompts[ref.number] for ref in refs], [ref.is_real for ref in refs]
            ),
            len(prompts),
            batch_size=self.rollout_batch_size,
            rank=rank,
            world_size=world_size,
        )

    def state_dict(self) -> dict[str, Any]:
        """Where training stands: the RL step to do next."""
        is_between = True
        if self.trainer is not None:  # else prepared but not begun, or begun but not ended
            ended = self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
            is_between = self._is_used and bool(ended)
        return {**asdict(self._now if is_between else self._before), "is_between": is_between}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on with the RL step that a checkpoint names."""
        progress = dict(state_dict)
        if not progress.pop("is_between"):
            logger.warning(
                "the checkpoint was taken within RL step %d: its rollouts are drawn anew by the "
                "policy as it is now; checkpoints at the end of epochs resume exactly",
                progress["step"],
            )
        self._now = self._before = RLProgress(**progress)

    def teardown(self, stage: str) -> None:
        """Ends the grading threads."""
        for part in (self._source, self.validation):
            if part is not None:
                part.close()
        self._source = None


class _Batches(Dataset[Any]):
    """Batches that are made when they are asked for."""

    def __init__(self, make: Callable[[Sequence[ExampleRef]], Any]) -> None:
        self.make = make

    def __getitem__(self, refs: Sequence[ExampleRef]) -> Any:
        return self.make(refs)


def _loader(
    make: Callable[[Sequence[ExampleRef]], Any], count: int, *, batch_size: int = 1, **place: int
) -> DataLoader[Any]:
    plan = FixedPlan(np.arange(count), batch_size=batch_size, **place)
    return planned_loader(_Batches(make), plan)
