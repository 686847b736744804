"""Loaders over the items of an RL step and over held-out prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from datamodules.epoch_plan import ExampleRef, FixedPlan
from datamodules.resuming import ResumableLoader, planned_loader
from lit_dlm.backbones import BackboneSpec
from lit_dlm.modules.rollout_batch import RolloutBatch, collate_items
from lit_dlm.modules.rollout_items import RolloutItem
from lit_dlm.modules.rollout_updates import Slot
from lit_dlm.modules.rollout_validation import ValidationBatch
from lit_dlm.modules.rollouts import RolloutPrompt
from lit_dlm.trajectories.record import Trajectory


def item_loader(dataset: ItemDataset) -> DataLoader[Any]:
    """A loader over the batches of this process, in the order they were dealt.

    Args:
        dataset: the batches.
    """
    return ResumableLoader(
        dataset, sampler=_InOrder(len(dataset)), batch_size=None, collate_fn=_as_is
    )


def prompt_loader(
    prompts: Sequence[RolloutPrompt], *, batch_size: int, rank: int, world_size: int
) -> DataLoader[Any]:
    """A loader over held-out prompts, dealt out evenly; copies fill the last batches.

    Args:
        prompts: those of all processes.
        batch_size: prompts per batch.
        rank: number of this process.
        world_size: processes.
    """
    plan = FixedPlan(
        np.arange(len(prompts)), batch_size=batch_size, rank=rank, world_size=world_size
    )
    return planned_loader(_PromptDataset(prompts), plan)


class ItemDataset(Dataset[RolloutBatch]):
    """Batches of one RL step, collated when they are asked for."""

    def __init__(
        self,
        batches: Sequence[Sequence[Slot]],
        items: Sequence[RolloutItem],
        records: Sequence[Trajectory],
        spec: BackboneSpec,
        *,
        num_slots: int,
        is_empty: bool,
    ) -> None:
        """Sets up the dataset.

        Args:
            batches: which items each batch holds.
            items: all items.
            records: the rollouts that items number.
            spec: of the training rows.
            num_slots: items of a full batch.
            is_empty: whether there is nothing to learn from.
        """
        self.batches = batches
        self.items = items
        self.records = records
        self.spec = spec
        self.num_slots = num_slots
        self.is_empty = is_empty

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> RolloutBatch:
        return collate_items(
            [(self.items[slot.item], slot.factor) for slot in self.batches[number]],
            self.records,
            self.spec,
            num_slots=self.num_slots,
            is_empty=self.is_empty,
        )


class _PromptDataset(Dataset[ValidationBatch]):
    """Batches of held-out prompts."""

    def __init__(self, prompts: Sequence[RolloutPrompt]) -> None:
        self.prompts = prompts

    def __getitem__(self, batch: Sequence[ExampleRef]) -> ValidationBatch:
        return ValidationBatch(
            prompts=[self.prompts[ref.number] for ref in batch],
            is_real=[ref.is_real for ref in batch],
        )


class _InOrder(DistributedSampler[int]):
    """Numbers in order; a distributed sampler, so that Lightning leaves the batches as dealt."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))

    def set_epoch(self, epoch: int) -> None:
        """Does nothing: the batches are dealt already."""
        del epoch


def _as_is(batch: Any) -> Any:
    return batch
