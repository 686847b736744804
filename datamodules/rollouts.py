"""Data of reinforcement learning: prompts, rewards, and one RL step per epoch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader

from lit_dlm.datamodules.resuming import (
    ExampleRef,
    ResumableDataModule,
    computed_loader,
    set_accumulation,
)
from lit_dlm.rl.items import RolloutBatch
from lit_dlm.rl.metrics import RolloutValidation, validation_of
from lit_dlm.rl.module import TraceRLModule
from lit_dlm.rl.rollout import OnlineRollouts, RolloutSource, StoredRollouts
from lit_dlm.rl.settings import RolloutSettings
from lit_dlm.system.options import of_kind

logger = logging.getLogger(__name__)


class RolloutDataModule(RolloutSettings, ResumableDataModule):
    """Provides what the module rolls out and scores; an epoch's batches are the module's RL step.

    A run that is stopped between two RL steps resumes as if it had never stopped.
    """

    _source: RolloutSource | None = None
    _validation: RolloutValidation | None = None
    _limit: int | float = 1.0  # of validation batches, as the trainer had it

    def setup(self, stage: str | None = None) -> None:
        if self._source is not None or stage not in ("fit", "validate", None):
            return
        module, trainer = self._module, self._module.trainer
        if stage == "fit":
            size = {"batch_size": self.batch_size, "packing": module.rows.copies}
            set_accumulation(trainer, self.rows_per_update, **size)
        for reward in self.rewards:
            reward.setup(module)
        if self.shards is not None:
            logger.warning(
                "source 'shards' takes prompts, rewards and kept groups as they are stored in %s: "
                "tasks, prompts_per_step, responses_per_prompt, filters, overlong_is_wrong and "
                "overlong_margin are not read",
                self.shards,
            )
            backbone, mask_id = module.backbone, module.backbone.spec.mask_id
            self._source = StoredRollouts(self.shards, mask_id=mask_id, backbone=backbone)
        else:
            self._source = OnlineRollouts(module, module.method, self)
        if self.val_tasks:
            self._limit = limit = trainer.limit_val_batches
            if isinstance(limit, int):
                limit *= self.rollout_batch_size * trainer.world_size
            self._validation = validation_of(module, module.val_methods, self, limit=limit)
            # For Lightning, a batch is a decoder with all prompts that it answers.
            trainer.limit_val_batches = float(limit > 0)
        module.roll_out_from(self._source, self, self._validation)

    @property
    def _module(self) -> TraceRLModule:
        module = self.trainer.lightning_module if self.trainer is not None else None
        return of_kind(module, TraceRLModule, option="model")

    def train_dataloader(self) -> DataLoader[Any]:
        """Returns the batches of the module's next RL step, collated when they are requested."""
        module = self._module
        assert self.trainer is not None
        stoppers = self.trainer.early_stopping_callbacks
        # A finished run that is started again asks for batches before it sees that none are left.
        has_ended = any(one.wait_count >= one.patience for one in stoppers)
        is_over = has_ended or self.trainer.fit_loop.done
        count = 0 if is_over else len(module.next_rl_step().batches)

        def batch(refs: Sequence[ExampleRef]) -> RolloutBatch:
            # Lightning keeps the loader while the next RL step is made; it must not hold this one.
            assert module.current is not None
            return module.current.batch(refs[0].number)

        return computed_loader(batch, count)

    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """Returns decoders; each answers all held-out prompts, with the same noise every time."""
        if self._validation is None:
            return []
        methods = list(self._validation.engines)
        return computed_loader(lambda refs: methods[refs[0].number], len(methods))

    @property
    def _update(self) -> dict[str, int]:
        assert self.trainer is not None
        processes = self.trainer.world_size
        batches = self.trainer.accumulate_grad_batches * processes
        rows = self.batch_size * self._module.rows.copies * batches
        return {"processes": processes, "rows_per_update": rows}

    def teardown(self, stage: str) -> None:
        for part in (self._source, self._validation):
            if part is not None:
                part.close()
        if self._validation is not None and self.trainer is not None:
            self.trainer.limit_val_batches = self._limit
        self._source = None
