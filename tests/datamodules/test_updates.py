"""The rows of an update: what the trainer accumulates for any number of processes."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from lit_dlm.datamodules.updates import set_accumulation


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
