"""What loaders need to go on exactly where a run stopped, whatever its number of processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, Dataset

from datamodules.epoch_plan import EpochPlan, ExampleRef, FixedPlan


class ResumableLoader(DataLoader[Any]):
    """A loader that a checkpoint need not describe: the optimiser step says where it stands."""

    def state_dict(self) -> dict[str, int]:
        """Nothing to keep; having the method tells Lightning that resuming is exact."""
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Nothing to restore."""
        del state


def planned_loader(
    dataset: Dataset[Any], plan: EpochPlan | FixedPlan, *, num_workers: int = 0
) -> ResumableLoader:
    """A loader over whole batches that a plan lists, in page-locked memory where there is a GPU.

    Args:
        dataset: gives a collated batch for a list of example references.
        plan: which examples go into which batch.
        num_workers: loader processes.
    """
    return ResumableLoader(
        dataset,
        sampler=plan,
        batch_size=None,
        collate_fn=_as_is,
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
    )


class _Computed(Dataset[Any]):
    """Batches that are made when they are asked for."""

    def __init__(self, make: Callable[[Sequence[ExampleRef]], Any]) -> None:
        self.make = make

    def __getitem__(self, refs: Sequence[ExampleRef]) -> Any:
        return self.make(refs)


def computed_loader(
    make: Callable[[Sequence[ExampleRef]], Any],
    count: int,
    *,
    batch_size: int = 1,
    rank: int = 0,
    world_size: int = 1,
) -> ResumableLoader:
    """A loader over batches that a function makes, in order; copies fill the last ones.

    Args:
        make: gives a collated batch for a list of example references.
        count: examples of all ranks.
        batch_size: examples per batch and rank.
        rank: global rank.
        world_size: number of processes.
    """
    plan = FixedPlan(np.arange(count), batch_size=batch_size, rank=rank, world_size=world_size)
    return planned_loader(_Computed(make), plan)


def place(trainer: Trainer | None) -> tuple[int, int]:
    """Rank and number of processes; one process without a trainer."""
    return (trainer.global_rank, trainer.world_size) if trainer is not None else (0, 1)


def refuse_overfit_batches(trainer: Trainer | None, *, instead: str) -> None:
    """Refuses the trainer's option that would replace a plan by a sampler of Lightning's own.

    Args:
        trainer: the trainer; anything goes without one.
        instead: the option that takes few examples.

    Raises:
        ValueError: ``overfit_batches`` is set.
    """
    share = 0 if trainer is None else trainer.overfit_batches  # type: ignore[attr-defined]
    if share:
        raise ValueError(
            f"trainer.overfit_batches: expected 0, got {share}; to train on few examples again "
            f"and again, use {instead}"
        )


def batches_done(trainer: Trainer | None, batches_per_pass: int) -> int:
    """Training batches that each process has consumed, from the optimiser steps taken.

    An incomplete accumulation at the end of a pass also ends in a step.

    Args:
        trainer: the trainer; 0 without one.
        batches_per_pass: length of a pass.
    """
    if trainer is None:
        return 0
    accumulate = trainer.accumulate_grad_batches
    steps_per_pass = -(-batches_per_pass // accumulate)
    passes, steps = divmod(trainer.global_step, steps_per_pass)
    return passes * batches_per_pass + min(steps * accumulate, batches_per_pass)


def _as_is(batch: Any) -> Any:
    """The dataset collates; the loader must not."""
    return batch
