"""Reinforcement learning's data: every epoch is one RL step on fresh rollouts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from lit_dlm.datamodules.epoch_plan import ExampleRef
from lit_dlm.datamodules.resuming import (
    computed_loader,
    require_same_update,
    set_accumulation,
)
from lit_dlm.rewards import RewardModel
from lit_dlm.rl.advantages import as_advantage
from lit_dlm.rl.items import RolloutBatch
from lit_dlm.rl.metrics import RolloutValidation
from lit_dlm.rl.module import TraceRLModule
from lit_dlm.rl.progress import RolloutProgress
from lit_dlm.rl.rollout import OnlineRollouts, RolloutSource, StoredRollouts
from lit_dlm.rl.settings import RolloutSettings
from lit_dlm.rl.step import RLProgress, RLStep, rl_step
from lit_dlm.trajectories.record import Trajectory

logger = logging.getLogger(__name__)


class RolloutDataModule(RolloutSettings, LightningDataModule):
    """RL steps as epochs; a run stopped between two of them resumes as if it had not been."""

    _source: RolloutSource | None = None
    _step: RLStep | None = None
    _loader: DataLoader[Any] | None = None
    _is_used = True  # whether the batches of ``_loader`` have been asked for
    _now = _before = RLProgress()
    _accumulate = 1
    _limit: int | float = 1.0
    validation: RolloutValidation | None = None
    """Scores held-out prompts, if there are any."""

    def setup(self, stage: str | None = None) -> None:
        """Tokenises prompts and prepares engine, rewards and validation."""
        if self._source is not None or stage not in ("fit", "validate", None):
            return
        module, trainer = self._module, self._module.trainer
        if stage == "fit":
            size = {"batch_size": self.batch_size, "packing": module.rows.copies}
            set_accumulation(trainer, self.rows_per_update, **size)
            self._accumulate = trainer.accumulate_grad_batches
        for reward in self.rewards:
            if isinstance(reward, RewardModel) and reward.device is None:
                reward.device = str(trainer.strategy.root_device)
        if self.shards is not None:
            self.warn_of_unread()
            backbone, mask_id = module.backbone, module.backbone.spec.mask_id
            self._source = StoredRollouts(self.shards, mask_id=mask_id, backbone=backbone)
        else:
            self._source = OnlineRollouts(module, module.method, self)
        if self.val_tasks:
            self._limit = limit = trainer.limit_val_batches
            if isinstance(limit, int):
                limit *= self.rollout_batch_size * trainer.world_size
            methods = module.val_methods
            self.validation = RolloutValidation.of(module, methods, self, limit=limit)
            # A batch of Lightning's is a decoder and all that it answers.
            trainer.limit_val_batches = float(limit > 0)

    @property
    def _module(self) -> TraceRLModule:
        module = self.trainer.lightning_module if self.trainer is not None else None
        if not isinstance(module, TraceRLModule):
            raise ValueError(f"model: expected a TraceRLModule, got {type(module).__name__}")
        return module

    def train_dataloader(self) -> DataLoader[Any]:
        """Runs an RL step up to its updates, and returns a loader for these."""
        if self._loader is not None and not self._is_used:
            return self._loader  # Lightning asks twice when it resumes
        module, trainer, source = self._module, self._module.trainer, self._source
        assert source is not None
        self._step = self._loader = None  # no two RL steps in memory
        with module.generating():
            self._step = rl_step(
                module,
                source,
                as_advantage(self.advantage),
                self._now,
                batch_size=self.batch_size,
                accumulate=self._accumulate,
                max_tokens=self.max_tokens_per_batch,
                passes=self.passes,
                smoothing=self.smoothing,
                seed=self.seed,
                version=trainer.global_step,
                ranks=module.ranks,
                report=RolloutProgress(trainer, self._now.step),
            )
        trainer.accumulate_grad_batches = self._step.accumulate
        self._before, self._now, self._is_used = self._now, self._step.progress, False
        self._loader = computed_loader(self._batch, len(self._step.batches))
        return self._loader

    def _batch(self, refs: Sequence[ExampleRef]) -> RolloutBatch:
        assert self._step is not None
        self._is_used = True
        return self._step.batch(refs[0].number)

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

    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """Decoders, each of which answers all held-out prompts, with the same noise every time."""
        if self.validation is None:
            return []
        methods = list(self.validation.engines)
        return computed_loader(lambda refs: methods[refs[0].number], len(methods))

    def state_dict(self) -> dict[str, Any]:
        """Where training stands: the RL step to do next."""
        is_between = True
        if self.trainer is not None:  # else prepared but not begun, or begun but not ended
            ended = self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
            is_between = self._is_used and bool(ended)
        progress = asdict(self._now if is_between else self._before)
        return {**progress, "is_between": is_between, "update": self._update}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on with the RL step that a checkpoint names."""
        progress = dict(state_dict)
        require_same_update(self._module.trainer, progress.pop("update"), self._update)
        if not progress.pop("is_between"):
            logger.warning(
                "the checkpoint was taken within RL step %d: its rollouts are drawn anew by the "
                "policy as it is now; checkpoints at the end of epochs resume exactly",
                progress["step"],
            )
        self._now = self._before = RLProgress(**progress)

    @property
    def _update(self) -> dict[str, int]:
        """What an update is made of; an RL step may deal its rows in batches of any size."""
        if self.trainer is None:
            return {}
        processes = self.trainer.world_size
        rows = self.batch_size * self._module.rows.copies * self._accumulate * processes
        return {"processes": processes, "rows_per_update": rows}

    def teardown(self, stage: str) -> None:
        """Ends the grading threads."""
        for part in (self._source, self.validation):
            if part is not None:
                part.close()
        if self.validation is not None and self.trainer is not None:
            self.trainer.limit_val_batches = self._limit
        self._source = None
