"""What data needs to go on exactly where a run stopped, on as many processes as before."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from lit_dlm.datamodules.epoch_plan import EpochPlan, ExampleRef, FixedPlan, Plan

logger = logging.getLogger(__name__)


class ResumableLoader(DataLoader[Any]):
    """A loader that a checkpoint need not describe: the optimiser step says where it stands."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Asks for the first batch late, as a trainer that resumes knows its step late."""
        yield from super().__iter__()

    # Having these tells Lightning that resuming is exact.
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class _Listed(Dataset[Any]):
    """What a plan lists, as it is."""

    def __getitem__(self, refs: list[ExampleRef]) -> list[ExampleRef]:
        return refs


def _planned_loader(
    make: Callable[[list[ExampleRef]], Any], plan: Plan, *, num_workers: int = 0
) -> ResumableLoader:
    """A loader over the batches that a function makes of what a plan lists."""
    return ResumableLoader(
        _Listed(),
        sampler=plan,
        batch_size=None,
        collate_fn=make,
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
    )


def computed_loader(make: Callable[[list[ExampleRef]], Any], count: int) -> ResumableLoader:
    """A loader over so many batches, each of which is made of one example reference, in order."""
    return _planned_loader(make, FixedPlan(range(count), batch_size=1))


class ResumableDataModule(LightningDataModule):
    """Data whose order follows from the optimiser step, so that a checkpoint keeps no position.

    The step says where a run stands only if an update is made of the same batches as before, by the
    same processes; a checkpoint keeps what these were.
    """

    batch_size: int
    seed: int
    num_workers: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {} if self.trainer is None else self._update

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.trainer is not None:
            require_same_update(self.trainer, state_dict, self._update)

    @property
    def _update(self) -> dict[str, int]:
        assert self.trainer is not None
        return {
            "processes": self.trainer.world_size,
            "accumulate_grad_batches": self.trainer.accumulate_grad_batches,
            "batch_size": self.batch_size,
        }

    def planned_training(
        self,
        make: Callable[[list[ExampleRef]], Any],
        blocks: NDArray[np.integer],
        numbers: NDArray[np.integer],
        **options: Any,
    ) -> ResumableLoader:
        """Shuffled batches, from where training stands.

        Args:
            make: gives a collated batch.
            blocks: ``(N,)`` block of each example.
            numbers: ``(N,)`` its number.
            options: of :class:`~datamodules.epoch_plan.EpochPlan`.
        """
        trainer = self.trainer
        accumulate = 1 if trainer is None else trainer.accumulate_grad_batches
        plan = EpochPlan(
            blocks,
            numbers=numbers,
            batch_size=self.batch_size,
            seed=self.seed,
            accumulate=accumulate,
            batches_done=lambda: 0 if trainer is None else trainer.global_step * accumulate,
            rank=self._rank,
            world_size=self._world_size,
            **options,
        )
        return _planned_loader(make, plan, num_workers=self.num_workers)

    def planned_validation(
        self,
        make: Callable[[list[ExampleRef]], Any],
        numbers: NDArray[np.integer],
        *,
        batch_size: int,
    ) -> ResumableLoader:
        """Examples in order, each once; ``batch_size`` of them per batch and process."""
        size = {"rank": self._rank, "world_size": self._world_size}
        plan = FixedPlan(numbers, batch_size=batch_size, **size)
        return _planned_loader(make, plan, num_workers=self.num_workers)

    @property
    def _rank(self) -> int:
        return 0 if self.trainer is None else self.trainer.global_rank

    @property
    def _world_size(self) -> int:
        return 1 if self.trainer is None else self.trainer.world_size


def require_same_update(trainer: Trainer, then: Mapping[str, int], now: Mapping[str, int]) -> None:
    """Refuses to go on training with other processes or batches than those of the checkpoint."""
    if trainer.state.fn == TrainerFn.FITTING and then != now:
        saved, here = (", ".join(f"{k} {v}" for k, v in one.items()) for one in (then, now))
        raise ValueError(f"ckpt_path: expected the same run as before, {saved}; got {here}")


def refuse_overfit_batches(trainer: Trainer | None, *, instead: str) -> None:
    """Refuses the trainer's option that would replace a plan by a sampler of Lightning's own."""
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
        rows_per_update: of all processes; ``None`` leaves the trainer's own setting.
        batch_size: items of a batch of one process.
        packing: rows in each item.
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
