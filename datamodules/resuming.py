"""What data needs to go on exactly where a run stopped, on as many processes as before."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from lit_dlm.datamodules.epoch_plan import EpochPlan, ExampleRef, FixedPlan

logger = logging.getLogger(__name__)


class ResumableLoader(DataLoader[Any]):
    """A loader that a checkpoint need not describe: the optimiser step says where it stands."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Asks for the first batch late, as a trainer that resumes knows its step late."""
        yield from super().__iter__()

    def state_dict(self) -> dict[str, int]:
        """Nothing to keep; having the method tells Lightning that resuming is exact."""
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Nothing to restore."""
        del state


def _planned_loader(
    dataset: Dataset[Any], plan: EpochPlan | FixedPlan, *, num_workers: int = 0
) -> ResumableLoader:
    """A loader over whole batches that a plan lists, in page-locked memory where there is a GPU."""
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


def computed_loader(make: Callable[[Sequence[ExampleRef]], Any], count: int) -> ResumableLoader:
    """A loader over batches that a function makes, in order.

    Args:
        make: gives a batch for a list of one example reference.
        count: how many batches.
    """
    return _planned_loader(_Computed(make), FixedPlan(np.arange(count), batch_size=1))


class ResumableDataModule(LightningDataModule):
    """Data whose order follows from the optimiser step, so that a checkpoint keeps no position.

    The step says where a run stands only if an update is made of the same batches as before, by the
    same processes; a checkpoint keeps what these were.
    """

    batch_size: int
    max_tokens_per_batch: int | None = None
    seed: int
    num_workers: int = 0

    def state_dict(self) -> dict[str, Any]:
        """What an update is made of, and who reads it."""
        return {} if self.trainer is None else self._update

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuses to go on with updates that are those of another run."""
        if self.trainer is not None:
            require_same_update(self.trainer, state_dict, self._update)

    @property
    def _update(self) -> dict[str, int]:
        assert self.trainer is not None
        return {
            "processes": self.trainer.world_size,
            "accumulate_grad_batches": self.trainer.accumulate_grad_batches,
            "batch_size": self.max_tokens_per_batch or self.batch_size,
        }

    def planned_training(
        self,
        dataset: Dataset[Any],
        blocks: NDArray[np.integer],
        numbers: NDArray[np.integer],
        *,
        lengths: NDArray[np.integer] | None = None,
        blocks_per_group: int = 64,
        own_blocks: bool = False,
    ) -> ResumableLoader:
        """Shuffled examples, from where training stands.

        Args:
            dataset: gives a collated batch for a list of example references.
            blocks: block of each example.
            numbers: number of each example in ``dataset``.
            lengths: see :class:`~datamodules.epoch_plan.EpochPlan`.
            blocks_per_group: blocks whose examples are mixed.
            own_blocks: every loader worker of every process reads blocks of its own.
        """
        trainer = self.trainer
        rank, world_size = self._place
        accumulate = 1 if trainer is None else trainer.accumulate_grad_batches
        plan = EpochPlan(
            blocks,
            batch_size=self.batch_size,
            seed=self.seed,
            rank=rank,
            world_size=world_size,
            readers=max(1, self.num_workers) if own_blocks else 0,
            accumulate=accumulate,
            blocks_per_group=blocks_per_group,
            numbers=numbers,
            lengths=lengths,
            max_tokens=self.max_tokens_per_batch,
            batches_done=lambda: 0 if trainer is None else trainer.global_step * accumulate,
        )
        return _planned_loader(dataset, plan, num_workers=self.num_workers)

    def planned_validation(
        self, dataset: Dataset[Any], numbers: NDArray[np.integer], *, batch_size: int
    ) -> ResumableLoader:
        """Examples in order, each once.

        Args:
            dataset: gives a collated batch for a list of example references.
            numbers: number of each example in ``dataset``.
            batch_size: examples per batch and process.
        """
        rank, world_size = self._place
        plan = FixedPlan(numbers, batch_size=batch_size, rank=rank, world_size=world_size)
        return _planned_loader(dataset, plan, num_workers=self.num_workers)

    @property
    def _place(self) -> tuple[int, int]:
        """Rank and number of processes; one process without a trainer."""
        trainer = self.trainer
        return (0, 1) if trainer is None else (trainer.global_rank, trainer.world_size)


def require_same_update(trainer: Trainer, then: Mapping[str, int], now: Mapping[str, int]) -> None:
    """Refuses to go on training with other processes or batches than those of the checkpoint."""
    if trainer.state.fn == TrainerFn.FITTING and then != now:
        saved, here = (", ".join(f"{k} {v}" for k, v in one.items()) for one in (then, now))
        raise ValueError(f"ckpt_path: expected the same run as before, {saved}; got {here}")


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


def set_accumulation(
    trainer: Trainer, rows_per_update: int | None, *, batch_size: int, packing: int = 1
) -> None:
    """Sets ``accumulate_grad_batches`` so that an update has a given number of rows, and says so.

    Args:
        trainer: knows the number of processes.
        rows_per_update: rows of one optimiser step over all processes; ``None`` leaves the
            trainer's own setting.
        batch_size: items of a batch of one process.
        packing: rows in each item.

    Raises:
        ValueError: the rows cannot be dealt in whole batches, or the trainer has a setting of its
            own that says otherwise.
    """
    together = batch_size * packing * trainer.world_size
    if rows_per_update is not None:
        if rows_per_update < 1 or rows_per_update % together:
            raise ValueError(
                f"rows_per_update: expected a multiple of batch_size x packing x processes = "
                f"{batch_size} x {packing} x {trainer.world_size}, got {rows_per_update}"
            )
        wanted = rows_per_update // together
        if trainer.accumulate_grad_batches not in (1, wanted):
            raise ValueError(
                f"trainer.accumulate_grad_batches: expected none beside rows_per_update "
                f"{rows_per_update}, which makes it {wanted}, got {trainer.accumulate_grad_batches}"
            )
        trainer.accumulate_grad_batches = wanted
    if trainer.is_global_zero:
        logger.info(
            "one update: %d rows (%d processes x %d batches x %d items x %d rows)",
            together * trainer.accumulate_grad_batches,
            trainer.world_size,
            trainer.accumulate_grad_batches,
            batch_size,
            packing,
        )


def _as_is(batch: Any) -> Any:
    """The dataset collates; the loader must not."""
    return batch
