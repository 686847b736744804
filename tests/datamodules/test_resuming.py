"""The rows of an update, which any number of processes shares and a resumed run keeps."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn

from lit_dlm.datamodules.resuming import set_accumulation
from lit_dlm.datamodules.supervised import SupervisedDataModule
from lit_dlm.datamodules.trajectories import TrajectoryDataModule
from lit_dlm.modules.steps import drop_half_update
from tests.finetuning import Unread


def trainer(world_size: int, accumulate: int = 1) -> Any:
    return SimpleNamespace(
        world_size=world_size, accumulate_grad_batches=accumulate, is_global_zero=True
    )


@pytest.mark.parametrize(("world_size", "packing", "batches"), [(1, 1, 128), (8, 1, 16), (4, 4, 8)])
def test_any_number_of_processes_makes_the_same_update(
    world_size: int, packing: int, batches: int, caplog: pytest.LogCaptureFixture
) -> None:
    """256 rows in batches of two items: 256 / (2 x packing x processes) batches."""
    running = trainer(world_size)
    with caplog.at_level(logging.INFO):
        for _ in range(2):  # a second look finds what the first one set
            set_accumulation(running, 256, batch_size=2, packing=packing)
    assert running.accumulate_grad_batches == batches
    told = f"one update: 256 rows ({world_size} processes x {batches} batches x 2 items x {packing}"
    assert caplog.messages[0].startswith(told)


def test_without_rows_the_trainer_keeps_its_own_setting(caplog: pytest.LogCaptureFixture) -> None:
    running = trainer(2, accumulate=3)
    with caplog.at_level(logging.INFO):
        set_accumulation(running, None, batch_size=4)
    assert running.accumulate_grad_batches == 3
    assert "one update: 24 rows" in caplog.text


@pytest.mark.parametrize(
    ("rows", "accumulate", "message"),
    [
        (100, 1, "multiple of batch_size x packing x processes = 8 x 1 x 3, got 100"),
        (0, 1, "rows_per_update: expected a multiple"),
        (48, 4, "accumulate_grad_batches: expected none beside rows_per_update 48, .* 2, got 4"),
    ],
)
def test_rows_that_do_not_divide_and_two_settings_are_refused(
    rows: int, accumulate: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        set_accumulation(trainer(3, accumulate), rows, batch_size=8)


def running(data: Any, world_size: int, accumulate: int = 1) -> Any:
    """Data in a fit on so many processes."""
    data.trainer = SimpleNamespace(
        world_size=world_size,
        accumulate_grad_batches=accumulate,
        state=SimpleNamespace(fn=TrainerFn.FITTING),
    )
    return data


def supervised(processes: int, accumulate: int, size: int) -> SupervisedDataModule:
    return running(SupervisedDataModule([Unread()], batch_size=size), processes, accumulate)


def readers(processes: int, num_workers: int) -> TrajectoryDataModule:
    return running(TrajectoryDataModule("shards", num_workers=num_workers), processes)


@pytest.mark.parametrize(
    ("make", "now", "message"),
    [
        (supervised, (2, 3, 4), None),
        (supervised, (1, 6, 4), "processes 2, .* got processes 1,"),
        (supervised, (2, 4, 4), "accumulate_grad_batches 3, .* got .*accumulate_grad_batches 4,"),
        (supervised, (2, 3, 8), "batch_size 4; got .* batch_size 8"),
        (readers, (2, 3), None),
        (readers, (1, 3), "processes 2, .* got processes 1,"),
        (readers, (2, 0), "num_workers 3; got .* num_workers 0"),
    ],
)
def test_a_fit_goes_on_with_the_processes_and_batches_it_began_with(
    make: Any, now: tuple[int, ...], message: str | None
) -> None:
    state = make(*((2, 3, 4) if make is supervised else (2, 3))).state_dict()
    if message is None:
        make(*now).load_state_dict(state)
        return
    with pytest.raises(
        ValueError, match=f"ckpt_path: expected the same run as before, .*{message}"
    ):
        make(*now).load_state_dict(state)


@pytest.mark.parametrize(("ready", "found"), [(6, 6), (7, 6)])
def test_half_an_update_is_done_again(ready: int, found: int) -> None:
    """Counts stay as far apart as they were: the save came before the batch was completed."""
    module = LightningModule()
    data = supervised(1, 2, 1)
    module._trainer = SimpleNamespace(  # type: ignore[assignment]
        datamodule=data, accumulate_grad_batches=2
    )
    counts = {"ready": ready, "started": ready, "processed": ready, "completed": ready - 1}
    progress = {"total": dict(counts), "current": dict(counts)}
    checkpoint = {
        "SupervisedDataModule": data.state_dict(),
        "loops": {"fit_loop": {"epoch_loop.batch_progress": progress}},
    }
    drop_half_update(module, checkpoint)
    wanted = {"ready": found, "started": found, "processed": found, "completed": found - 1}
    assert progress == {"total": wanted, "current": wanted}
