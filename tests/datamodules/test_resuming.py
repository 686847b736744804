"""The rows of an update, which any number of processes shares and a resumed run keeps."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lit_dlm.datamodules.resuming import set_accumulation
from lit_dlm.datamodules.supervised import SupervisedDataModule
from lit_dlm.modules.elastic import count_anew
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


def supervised(
    processes: int, batches: int, size: int, *, joint: bool = False, **options: Any
) -> SupervisedDataModule:
    """Data of a run of so many processes; ``joint``: their losses are divided as one."""
    data = SupervisedDataModule([Unread()], batch_size=size, **options)
    module = nn.Sequential(nn.Dropout(0.1))
    module.has_joint_batches = joint  # type: ignore[assignment]
    data.trainer = SimpleNamespace(  # type: ignore[assignment]
        world_size=processes,
        accumulate_grad_batches=batches,
        state=SimpleNamespace(fn=TrainerFn.FITTING),
        lightning_module=module,
    )
    return data


@pytest.mark.parametrize(
    ("joint", "then", "now", "is_same"),
    [
        (False, (2, 3, 4), (1, 6, 4), True),  # six batches of four rows
        (False, (2, 3, 4), (3, 2, 4), True),
        (False, (2, 3, 4), (3, 3, 4), False),
        (False, (2, 3, 4), (1, 3, 8), False),  # as many rows, but each batch is a mean of its own
        (True, (2, 3, 6), (1, 3, 12), True),  # twelve rows at a time, three times
        (True, (2, 3, 6), (3, 3, 4), True),
        (True, (2, 3, 6), (1, 6, 6), False),
    ],
)
def test_a_run_goes_on_with_the_same_updates_only(
    joint: bool, then: tuple[int, int, int], now: tuple[int, int, int], is_same: bool
) -> None:
    state = supervised(*then, joint=joint).state_dict()
    going_on = supervised(*now, joint=joint)
    if is_same:
        going_on.load_state_dict(state)
        return
    parts = [" x ".join(map(str, one)) for one in (then, now)]
    with pytest.raises(
        ValueError, match=f"ckpt_path: its updates .* = {parts[0]}; expected .* got {parts[1]}"
    ):
        going_on.load_state_dict(state)


def test_what_another_number_of_processes_changes_is_refused_or_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = supervised(2, 1, 4, joint=True).state_dict()
    with caplog.at_level(logging.WARNING):
        supervised(2, 1, 4, joint=True).load_state_dict(state)
        assert not caplog.messages
        supervised(1, 1, 8, joint=True).load_state_dict(state)
    assert "dropout: drawn by each process" in caplog.text
    with pytest.raises(ValueError, match="got 1 x 1 x 8"):
        supervised(1, 1, 8, joint=True, group_by_length=True).load_state_dict(state)


@pytest.mark.parametrize(
    ("ready", "then", "now", "found"),
    [(18, 6, 2, 6), (6, 2, 6, 18), (7, 2, 2, 6)],  # the last one: half an update is done again
)
def test_batches_are_counted_as_one_process_of_now_has_them(
    ready: int, then: int, now: int, found: int
) -> None:
    """Counts stay as far apart as they were: the save came before the batch was completed."""
    module = LightningModule()
    data = supervised(1, now, 1)
    module._trainer = SimpleNamespace(  # type: ignore[assignment]
        datamodule=data, accumulate_grad_batches=now
    )
    counts = {"ready": ready, "started": ready, "processed": ready, "completed": ready - 1}
    progress = {"total": dict(counts), "current": dict(counts)}
    checkpoint = {
        "SupervisedDataModule": {"batches": then},
        "loops": {"fit_loop": {"epoch_loop.batch_progress": progress}},
    }
    count_anew(module, checkpoint)
    wanted = {"ready": found, "started": found, "processed": found, "completed": found - 1}
    assert progress == {"total": wanted, "current": wanted}
