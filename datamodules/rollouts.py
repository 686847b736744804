"""Data of reinforcement learning: prompts, rewards, and one RL step per epoch."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lit_dlm.datamodules.resuming import ExampleRef, ResumableDataModule, computed_loader
from lit_dlm.rl.batch import RolloutBatch
from lit_dlm.rl.loop import RLLoop
from lit_dlm.rl.metrics import RolloutValidation, validation_of
from lit_dlm.rl.module import TraceRLModule
from lit_dlm.rl.rollout import RolloutSource, StoredRollouts
from lit_dlm.rl.settings import RolloutSettings
from lit_dlm.system.options import of_kind, refuse
from lit_dlm.training.fit_loop import is_over, set_accumulation
from lit_dlm.training.ranks import Ranks

logger = logging.getLogger(__name__)

_SECONDS = 10.0  # between two lines of progress


class RolloutDataModule(RolloutSettings, ResumableDataModule):
    """Provides what the module rolls out and scores; an epoch's batches are those of an RL step.

    A run that is stopped between two RL steps resumes as if it had never stopped.
    """

    loop: RLLoop | None = None  # between setup and teardown
    _limit: int | float = 1.0  # of validation batches, as the trainer had it

    def __post_init__(self) -> None:
        ResumableDataModule.__init__(self)
        super().__post_init__()

    def setup(self, stage: str | None = None) -> None:
        if self.loop is not None or stage not in ("fit", "validate", None):
            return
        trainer, module = self._trainer, self._module
        if stage == "fit":
            size = {"batch_size": self.batch_size, "packing": module.rows.copies}
            set_accumulation(trainer, self.rows_per_update, **size)
        for reward in self.rewards:
            reward.setup(module)
        source, validation = self._new_source(module), None
        if self.val_tasks:
            is_mean = len(module.rollout_methods) > 1
            validation = validation_of(module, module.val_methods, self, is_mean=is_mean)
            # For Lightning, a batch is a decoder with all prompts that it answers.
            self._limit = trainer.limit_val_batches
            trainer.limit_val_batches = float(self._limit > 0)
        if stage == "fit":
            check_monitors(trainer, validation)
        ranks = Ranks(trainer.global_rank, trainer.world_size, trainer.strategy.root_device)
        self.loop = module.loop = RLLoop(module, source, self, validation, ranks)

    def _new_source(self, module: TraceRLModule) -> RolloutSource:
        if not module.replays_shards and (self.shards or self.engine):
            kind = f"{type(module).__name__}, which trains on what its own decodes saw"
            if self.engine is not None:
                refuse("engine", f"none with {kind}", type(self.engine).__name__)
            refuse("source", f"online with {kind}", "shards")
        for name in module.rollout_methods:  # training replays a block after the one before it
            if getattr(module.decoders[name].window, "pipelined", False):
                refuse(f"decoders.{name}.window", "blocks that wait for one another", "a pipeline")
        if self.shards is None:
            return module.online_rollouts(module, module.rollout_methods, self)
        logger.warning(
            "source 'shards' takes prompts, rewards and kept groups as they are stored in %s: "
            "tasks, prompts_per_step, responses_per_prompt, filters, overlong_is_wrong and "
            "overlong_margin are not read",
            self.shards,
        )
        backbone = module.backbone
        return StoredRollouts(self.shards, mask_id=backbone.spec.mask_id, backbone=backbone)

    @property
    def _trainer(self) -> Trainer:
        assert self.trainer is not None
        return self.trainer

    @property
    def _module(self) -> TraceRLModule:
        return of_kind(self._trainer.lightning_module, TraceRLModule, option="model")

    @property
    def _loop(self) -> RLLoop:
        assert self.loop is not None
        return self.loop

    def train_dataloader(self) -> DataLoader[Any]:
        """Returns the batches of the next RL step, collated when they are requested."""
        loop, trainer, count = self._loop, self._trainer, 0
        if not is_over(trainer):
            step = loop.next_step(
                accumulate=trainer.accumulate_grad_batches,
                version=trainer.global_step,
                report=RolloutProgress(trainer, loop.progress.step),
            )
            count = len(step.batches)

        def batch(refs: Sequence[ExampleRef]) -> RolloutBatch:
            # Lightning keeps the loader while the next RL step is made; it must not hold this one.
            return loop.current.batch(refs[0].number)

        return computed_loader(batch, count)

    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """Returns decoders; each answers all held-out prompts, with the same noise every time."""
        validation = self._loop.validation
        if validation is None:
            return []
        methods = list(validation.engines)
        return computed_loader(lambda refs: methods[refs[0].number], len(methods))

    @property
    def _update(self) -> dict[str, int]:
        trainer = self._trainer
        batches = trainer.accumulate_grad_batches * trainer.world_size
        rows = self.batch_size * self._module.rows.copies * batches
        return {"processes": trainer.world_size, "rows_per_update": rows}

    def teardown(self, stage: str) -> None:
        if self.loop is None:
            return
        self.loop.close()
        if self.loop.validation is not None:
            self._trainer.limit_val_batches = self._limit
        self.loop = None


def check_monitors(trainer: Trainer, validation: RolloutValidation | None) -> None:
    """Refuses to monitor held-out scores that no validation logs, before the first rollout.

    Where nothing is graded there is no accuracy, and the reward is monitored instead.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    known = [] if validation is None else [f"val/{name}" for name in validation.names]
    # What a callback of the user's own logs is not known before it has done so.
    is_closed = all(
        type(one).__module__.startswith(("lit_dlm.", "lightning.")) for one in callbacks
    )
    for callback in callbacks:
        monitor = getattr(callback, "monitor", None) or ""
        if not monitor.startswith("val/") or monitor in known:
            continue
        option = f"{type(callback).__name__}.monitor"
        reward = monitor.removesuffix("accuracy") + "reward"
        if monitor.endswith("/accuracy") and reward in known:
            message = "%s: nothing is graded on val_tasks, so %s replaces %s"
            logger.warning(message, option, reward, monitor)
            callback.monitor = reward
        elif is_closed:
            wanted = f"one of {', '.join(known)}" if known else "val_tasks, whose scores it names"
            raise ValueError(f"{option}: expected {wanted}, got {monitor!r}")


class RolloutProgress:
    """Logs phase, progress and time left; calls ``on_rollout_progress()`` of callbacks."""

    def __init__(self, trainer: Trainer, step: int) -> None:
        self.trainer = trainer
        self.step = step
        self._phase = ""
        self._began = self._logged = time.monotonic()

    def __call__(self, phase: str, done: int, total: int) -> None:
        now = time.monotonic()
        if phase != self._phase:
            # A phase's first report comes after its first batch, so the rate is known by then.
            self._phase, self._began = phase, self._logged
        if not self.trainer.is_global_zero:
            return
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if callable(taker := getattr(callback, "on_rollout_progress", None)):
                taker()
        if now - self._logged >= _SECONDS:
            left = (now - self._began) / max(done, 1) * (total - done)
            minutes, seconds = divmod(round(left), 60)
            message = "RL step %d: %s %d/%d, %d:%02d left"
            logger.info(message, self.step, phase, done, total, minutes, seconds)
            self._logged = now
        if done >= total:
            self._logged = now
