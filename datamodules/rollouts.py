"""Reinforcement learning's data: every epoch is one RL step on fresh rollouts.

``train_dataloader`` runs before each epoch, after the strategy has wrapped the model. It draws
prompts, lets the module roll out, scores, fills in advantages and old log-probabilities, and
returns a loader over training items. With ``source: shards`` it takes the rollouts of a former run
instead and does the rest alike.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from datamodules.resuming import place, save_at_ends_of_epochs, stop_at_ends_of_epochs
from datamodules.rollout_checks import check_settings, warn_of_long_rows, warn_of_unused
from datamodules.rollout_collection import (
    Collected,
    EncodedPrompt,
    OnlineCollector,
    ShardCollector,
    encoded_prompts,
    responses_of,
)
from datamodules.rollout_facts import rollout_facts
from datamodules.rollout_loader import ItemDataset, item_loader, prompt_loader
from datamodules.rollout_progress import RolloutProgress
from datamodules.updates import set_accumulation
from lit_dlm.modules.rollout_batch import RolloutBatch
from lit_dlm.modules.rollout_updates import Slot, deal, fill_advantages, fill_old_scores
from lit_dlm.modules.rollout_validation import (
    RolloutValidation,
    ValidationBatch,
    validation_rewards,
)
from lit_dlm.modules.rollouts import RolloutEngine, in_order
from lit_dlm.modules.sharding import decoding_weights, whole_weights
from lit_dlm.modules.tracerl import TraceRLModule
from lit_dlm.ops.advantages import GroupAdvantage
from lit_dlm.rewards import GroupFilter, Reward, Rewarder, RewardModel
from lit_dlm.tasks import Task, tasks_by_name

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Progress:
    """Where training stands between two RL steps; what a checkpoint keeps."""

    step: int = 0
    cursor: int = 0
    skipped: int = 0
    smoothed: float | None = None


class RolloutDataModule(LightningDataModule):
    """Rollouts, rewards, filters and training items of RL steps.

    Set ``trainer.reload_dataloaders_every_n_epochs: 1`` and ``max_epochs`` to the number of RL
    steps. Everything random follows from seeds, names and the number of the RL step, so a run that
    is stopped between two RL steps and resumed goes on as if it had not been. A ``ModelCheckpoint``
    that leaves open when it saves does so at the end of RL steps; ``EarlyStopping`` by a score of
    rollouts looks at it there, too.

    Args:
        tasks: training prompts.
        rewards: what responses are worth; with ``source: shards`` only used in validation.
        source: ``online`` rolls out, ``shards`` replays a folder that ``RolloutWriter`` wrote, with
            the groups that were kept; settings of new rollouts are not read then, with a warning.
        shards: that folder.
        val_tasks: held-out prompts; none by default.
        prompts_per_step: prompts of an RL step.
        responses_per_prompt: responses to each.
        response_length: cells of every response.
        max_prompt_length: prompts with more tokens are left out.
        rollout_batch_size: responses decoded together.
        batch_size: training items per batch and process; rows that are packed are one.
        rows_per_update: most rows of one update over all processes, from which the trainer's
            ``accumulate_grad_batches`` follows for any number of them; ``null`` leaves it alone.
        filters: groups that one of them drops are not trained on.
        max_rollout_rounds: rounds of rollouts per RL step; from the second on dropped groups are
            made up for by new prompts.
        overlong_is_wrong: calls training responses that fill their budget wrong, unread.
        overlong_margin: so many cells short of it count as filled, too (5 in dLLM-RL).
        advantage: how rewards of a group are compared.
        passes: passes over the items of an RL step, each in updates of its own; random states are
            drawn anew in each.
        val_responses: responses to each held-out prompt.
        val_response_length: cells of those; as many as in training by default.
        smoothing: weight of the past in ``rollout/reward_smoothed``.
        num_workers: threads that grade.
        seed: seed of the order of prompts and items.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        tasks: list[Task],
        *,
        rewards: list[Reward],
        source: Literal["online", "shards"] = "online",
        shards: str | None = None,
        val_tasks: list[Task] | None = None,
        prompts_per_step: int = 64,
        responses_per_prompt: int = 16,
        response_length: int = 256,
        max_prompt_length: int = 784,
        rollout_batch_size: int = 64,
        batch_size: int = 8,
        rows_per_update: int | None = None,
        filters: list[GroupFilter] | None = None,
        max_rollout_rounds: int = 1,
        overlong_is_wrong: bool = True,
        overlong_margin: int = 0,
        advantage: GroupAdvantage = "group_zscore",
        passes: int = 1,
        val_responses: int = 1,
        val_response_length: int | None = None,
        smoothing: float = 0.9,
        num_workers: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.tasks = tasks
        self.rewards = rewards
        self.source = source
        self.shards = shards
        self.val_tasks = val_tasks or []
        self.prompts_per_step = prompts_per_step
        self.responses_per_prompt = responses_per_prompt
        self.response_length = response_length
        self.max_prompt_length = max_prompt_length
        self.rollout_batch_size = rollout_batch_size
        self.batch_size = batch_size
        self.rows_per_update = rows_per_update
        self.filters = filters or []
        self.max_rollout_rounds = max_rollout_rounds
        self.overlong_is_wrong = overlong_is_wrong
        self.overlong_margin = overlong_margin
        self.advantage: GroupAdvantage = advantage
        self.passes = passes
        self.val_responses = val_responses
        self.val_response_length = (
            response_length if val_response_length is None else val_response_length
        )
        self.smoothing = smoothing
        self.num_workers = num_workers
        self.seed = seed
        check_settings(self)
        self.collected: Collected | None = None
        """Rollouts of the current RL step, those of all processes and of dropped groups too."""
        self.facts: dict[str, float] = {}
        """What is known of the current RL step, as it is logged."""
        self._collector: OnlineCollector | ShardCollector | None = None
        self._rewarders: list[Rewarder] = []
        self._now = self._before = _Progress()
        self._loader: DataLoader[Any] | None = None
        self._is_used = True

    # -- set-up ----------------------------------------------------------------------------------

    def setup(self, stage: str | None = None) -> None:
        """Tokenises prompts and prepares engine, rewards and validation.

        Raises:
            ValueError: the module cannot be trained on rollouts, no prompt is short enough, or the
                rows of an update do not divide.
        """
        if self._collector is not None or stage not in ("fit", "validate", None):
            return
        module = self._module()
        assert self.trainer is not None
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
        save_at_ends_of_epochs(self.trainer)
        stop_at_ends_of_epochs(self.trainer)
        if self.source == "shards":
            warn_of_unused(self)
            assert self.shards is not None
            self._collector = ShardCollector(self.shards, mask_id=module.backbone.spec.mask_id)
        else:
            rewarder = Rewarder(
                self.rewards,
                tasks_by_name(self.tasks),
                filters=self.filters,
                overlong_is_wrong=self.overlong_is_wrong,
                num_workers=self.num_workers,
            )
            self._rewarders.append(rewarder)
            prompts = self._prompts(self.tasks, self.response_length, "response_length")
            self._collector = OnlineCollector(
                self._engine(module.method, self.response_length),
                rewarder,
                prompts,
                filters=self.filters,
                num_prompts=self.prompts_per_step,
                num_responses=self.responses_per_prompt,
                max_rounds=self.max_rollout_rounds,
                seed=self.seed,
            )
        if self.val_tasks:
            rewarder = Rewarder(
                validation_rewards(self.rewards),
                tasks_by_name(self.val_tasks, option="val_tasks"),
                overlong_is_wrong=False,
                num_workers=self.num_workers,
            )
            self._rewarders.append(rewarder)
            self._val_prompts = self._prompts(
                self.val_tasks, self.val_response_length, "val_response_length"
            )
            module.validation = RolloutValidation(
                {
                    method: self._engine(method, self.val_response_length)
                    for method in module.val_methods
                },
                rewarder,
                num_prompts=len(self._val_prompts),
            )

    def _module(self) -> TraceRLModule:
        module = self.trainer.lightning_module if self.trainer is not None else None
        if not isinstance(module, TraceRLModule):
            raise ValueError(f"model: expected a TraceRLModule, got {type(module).__name__}")
        return module

    def _prompts(self, tasks: list[Task], response_length: int, option: str) -> list[EncodedPrompt]:
        module = self._module()
        prompts = encoded_prompts(module, tasks, max_length=self.max_prompt_length)
        warn_of_long_rows(module, prompts, response_length=response_length, option=option)
        return prompts

    def _engine(self, method: str, response_length: int) -> RolloutEngine:
        return RolloutEngine(
            self._module(),
            method=method,
            response_length=response_length,
            batch_size=self.rollout_batch_size,
            overlong_margin=self.overlong_margin,
        )

    def teardown(self, stage: str) -> None:
        """Ends the grading threads."""
        for rewarder in self._rewarders:
            rewarder.close()
        self._rewarders, self._collector = [], None

    # -- one RL step -----------------------------------------------------------------------------

    def train_dataloader(self) -> DataLoader[Any]:
        """Runs the first half of an RL step and returns a loader for the second."""
        assert self.trainer is not None
        interval = self.trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
        if interval != 1:
            raise ValueError(
                "trainer.reload_dataloaders_every_n_epochs: expected 1, so that every epoch has "
                f"rollouts of its own, got {interval}"
            )
        if self._loader is not None and not self._is_used:
            return self._loader  # Lightning asks twice when it resumes
        self._loader = None
        with self._generating() as module:
            self._loader = self._prepared(module)
        self._is_used = False
        return self._loader

    @contextmanager
    def _generating(self) -> Iterator[TraceRLModule]:
        """Evaluation mode and the trainer's precision."""
        assert self.trainer is not None
        module = self._module()
        was_training = {part: part.training for part in module.modules()}
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(self.trainer.precision_plugin.forward_context())
            module.eval()
            try:
                yield module
            finally:
                for part, flag in was_training.items():
                    part.training = flag

    def _prepared(self, module: TraceRLModule) -> DataLoader[Any]:
        trainer, now = self.trainer, self._now
        assert trainer is not None
        rank, world_size = place(trainer)
        bar = RolloutProgress(trainer, now.step)
        with decoding_weights(module.backbone):
            collected = self._collect(bar)
        self.collected = collected
        seconds = collected.seconds
        begin = time.perf_counter()
        kept = collected.kept
        passes = [module.rows.items(kept, epoch=number) for number in range(self.passes)]
        items = [item for part in passes for item in part]
        is_empty = not items
        if is_empty:
            # A forward must run all the same; its items have no weight.
            kept, items = collected.records, module.rows.items(collected.records)
            if not items:
                raise ValueError(
                    f"RL step {now.step}: no response has a token to train on; look at the "
                    f"decoder '{module.method}'"
                )
        with ExitStack() as stack:
            if module.value_head is not None:  # processes have different numbers of states
                stack.enter_context(whole_weights(module.value_backbone or module.backbone))
                stack.enter_context(whole_weights(module.value_head))
            estimates = fill_advantages(
                module,
                items,
                kept,
                kind=self.advantage,
                batch_size=self.batch_size,
                move=self._move,
                rank=rank,
                world_size=world_size,
                reduce=self._sum,
            )
        dropped = [] if is_empty else [r for r in collected.records if not r.meta["kept"]]
        collected.records = in_order(estimates.noted([*kept, *dropped]))
        facts = {} if module.value is None else {"rollout/value_mean": estimates.value_mean}
        seconds["value"] = time.perf_counter() - begin
        begin = time.perf_counter()
        batches = deal(
            *([item.size for item in part] for part in passes),
            batch_size=self.batch_size,
            accumulate=trainer.accumulate_grad_batches,
            rank=rank,
            world_size=world_size,
            seed=(self.seed, now.step),
        )
        if is_empty:
            batches = [[Slot(0, 0.0)]]
        sums = fill_old_scores(
            module,
            batches,
            items,
            kept,
            move=self._move,
            report=lambda done: bar("old log-probabilities", done, len(batches)),
        )
        seconds["old_log_prob"] = time.perf_counter() - begin
        facts |= self._mismatch(sums)
        self._advance(collected, is_empty, seconds, facts, len(items))
        module.note(self.facts)
        return item_loader(
            ItemDataset(
                batches,
                items,
                kept,
                module.row_spec,
                num_slots=self.batch_size,
                is_empty=is_empty,
            )
        )

    def _collect(self, bar: RolloutProgress) -> Collected:
        now = self._now
        assert self._collector is not None
        assert self.trainer is not None
        if isinstance(self._collector, ShardCollector):
            return self._collector.collect(now.step)
        return self._collector.collect(
            now.step, now.cursor, self.trainer, version=self.trainer.global_step, progress=bar
        )

    def _move(self, batch: RolloutBatch) -> RolloutBatch:
        assert self.trainer is not None
        moved: RolloutBatch = self.trainer.strategy.batch_to_device(batch)
        return moved

    def _sum(self, values: Tensor) -> Tensor:
        assert self.trainer is not None
        strategy = self.trainer.strategy
        total: Tensor = strategy.reduce(values.to(strategy.root_device), reduce_op="sum")
        return total.cpu()

    def _mismatch(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Means over all processes of what separates sampler and training forward."""
        total = self._sum(torch.stack(list(sums.values())).float())
        named = dict(zip(sums, total.tolist(), strict=True))
        count = named.pop("num_compared")
        return {f"rollout/{name}": value / count for name, value in named.items() if count}

    def _advance(
        self,
        collected: Collected,
        is_empty: bool,
        seconds: dict[str, float],
        facts: dict[str, float],
        num_items: int,
    ) -> None:
        now = self._now
        found = rollout_facts(collected.records)
        past = found["rollout/reward"] if now.smoothed is None else now.smoothed
        smoothed = self.smoothing * past + (1.0 - self.smoothing) * found["rollout/reward"]
        self._before = now
        self._now = _Progress(
            step=now.step + 1,
            cursor=now.cursor + collected.num_drawn,
            skipped=now.skipped + is_empty,
            smoothed=smoothed,
        )
        self.facts = {
            **found,
            **facts,
            "rollout/reward_smoothed": smoothed,
            "rollout/skipped_steps": float(self._now.skipped),
            "rollout/items": float(0 if is_empty else num_items),
            **{f"time/{name}": value for name, value in seconds.items()},
        }
        if is_empty:
            logger.warning(
                "RL step %d: the filters dropped all %d groups, nothing is learnt in this step",
                now.step,
                collected.num_drawn,
            )

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

    # -- validation ------------------------------------------------------------------------------

    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """Held-out prompts, the same ones with the same noise at every validation."""
        if not self.val_tasks:
            return []
        rank, world_size = place(self.trainer)
        prompts = [
            response
            for method in self._module().val_methods
            for response in responses_of(
                enumerate(self._val_prompts),
                method=method,
                step=0,
                num_responses=self.val_responses,
            )
        ]
        return prompt_loader(
            prompts, batch_size=self.rollout_batch_size, rank=rank, world_size=world_size
        )

    # -- resuming --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where training stands: the RL step to do next."""
        is_between = self._is_between_steps()
        progress = asdict(self._now if is_between else self._before)
        return {**progress, "is_between": is_between}

    @property
    def step(self) -> int:
        """Number of the RL step that is trained on, from 0."""
        return self._before.step

    def _is_between_steps(self) -> bool:
        if self.trainer is None:
            return True
        if not self._is_used:
            return False  # prepared, but not begun
        return bool(self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on with the RL step that a checkpoint names."""
        progress = dict(state_dict)
        if not progress.pop("is_between"):
            logger.warning(
                "the checkpoint was taken within RL step %d: its rollouts are drawn anew by the "
                "policy as it is now; checkpoints at the end of epochs resume exactly",
                progress["step"],
            )
        self._now = self._before = _Progress(**progress)
