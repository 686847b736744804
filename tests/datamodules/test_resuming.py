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
        own = trainer(2, accumulate=3)  # without rows its own setting is kept
        set_accumulation(own, None, batch_size=4)
    assert (running.accumulate_grad_batches, own.accumulate_grad_batches) == (batches, 3)
    told = f"one update: 256 rows ({world_size} processes x {batches} batches x 2 items x {packing}"
    assert caplog.messages[0].startswith(told)
    assert caplog.messages[-1].startswith("one update: 24 rows")


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


def fitting(kind: str, processes: int, *rest: int) -> Any:
    """Data in a fit on so many processes; of rows with accumulation and batch size."""
    accumulate, data = 1, None
    if kind == "rows":
        accumulate, size = rest
        data = SupervisedDataModule([Unread()], batch_size=size)
    else:
        data = TrajectoryDataModule("shards", num_workers=rest[0])
    data.trainer = trainer(processes, accumulate)
    data.trainer.state = SimpleNamespace(fn=TrainerFn.FITTING)
    return data


@pytest.mark.parametrize(
    ("kind", "before", "now", "message"),
    [
        ("rows", (2, 3, 4), (2, 3, 4), None),
        ("rows", (2, 3, 4), (1, 6, 4), "processes 2, .* got processes 1,"),
        ("rows", (2, 3, 4), (2, 4, 4), "accumulate_grad_batches 3, .* got .*_grad_batches 4,"),
        ("rows", (2, 3, 4), (2, 3, 8), "batch_size 4; got .* batch_size 8"),
        ("states", (2, 3), (2, 3), None),
        ("states", (2, 3), (1, 3), "processes 2, .* got processes 1,"),
        ("states", (2, 3), (2, 0), "num_workers 3; got .* num_workers 0"),
    ],
)
def test_a_fit_goes_on_with_the_processes_and_batches_it_began_with(
    kind: str, before: tuple[int, ...], now: tuple[int, ...], message: str | None
) -> None:
    data, state = fitting(kind, *now), fitting(kind, *before).state_dict()
    if message is None:
        data.load_state_dict(state)
        return
    with pytest.raises(ValueError, match=f"ckpt_path: expected the same run .*{message}"):
        data.load_state_dict(state)


@pytest.mark.parametrize(("ready", "found"), [(6, 6), (7, 6)])
def test_half_an_update_is_done_again(ready: int, found: int) -> None:
    """Counts stay as far apart as they were: the save came before the batch was completed."""
    module = LightningModule()
    data = fitting("rows", 1, 2, 1)
    options = {"datamodule": data, "accumulate_grad_batches": 2}
    module._trainer = SimpleNamespace(**options)  # type: ignore[assignment]
    counts = {"ready": ready, "started": ready, "processed": ready, "completed": ready - 1}
    progress = {"total": dict(counts), "current": dict(counts)}
    checkpoint = {
        "SupervisedDataModule": data.state_dict(),
        "loops": {"fit_loop": {"epoch_loop.batch_progress": progress}},
    }
    drop_half_update(module, checkpoint)
    wanted = {"ready": found, "started": found, "processed": found, "completed": found - 1}
    assert progress == {"total": wanted, "current": wanted}
