"""Updates of as many rows on any number of processes, and progress from which a run goes on."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loops import _FitLoop

from lit_dlm.training.fit_loop import (
    drop_failed_update,
    drop_half_update,
    make_epochs_whole,
    restart_epoch,
    set_accumulation,
)


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


def progress(ready: int) -> dict[str, Any]:
    """What a checkpoint counts that was saved before the last batch was completed."""
    counts = {**dict.fromkeys(("ready", "started", "processed"), ready), "completed": ready - 1}
    return {"total": counts, "current": dict(counts)}


@pytest.mark.parametrize(("ready", "ends_pass"), [(6, False), (7, False), (7, True)])
def test_half_an_update_is_done_again_unless_it_ends_a_pass(ready: int, ends_pass: bool) -> None:
    """Counts stay as far apart as they were."""
    module, found = LightningModule(), {**progress(ready), "is_last_batch": ends_pass}
    running: Any = trainer(1, accumulate=2)
    running.datamodule = object()
    module._trainer = running
    loops = {"fit_loop": {"epoch_loop.batch_progress": found}}
    drop_half_update(module, {"object": {"accumulate_grad_batches": 2}, "loops": loops})
    assert found == {**progress(7 if ends_pass else 6), "is_last_batch": ends_pass}


def test_a_batch_that_failed_and_its_update_are_done_again() -> None:
    """The fifth batch of updates of three failed: the fourth is lost, too."""
    loops = _FitLoop(Trainer(logger=False, barebones=True))
    counts = loops.epoch_loop.batch_progress
    for one in (counts.total, counts.current):
        one.ready, one.started, one.processed, one.completed = 5, 5, 4, 4
    running: Any = SimpleNamespace(fit_loop=loops, accumulate_grad_batches=3)
    drop_failed_update(running)
    for one in (counts.total, counts.current):
        assert (one.ready, one.started, one.processed, one.completed) == (3, 3, 3, 3)


def test_an_epoch_begins_anew_without_the_batches_it_had() -> None:
    """Seven batches of all are the two of this epoch and five before; it is the third epoch."""
    kinds = ("ready", "started", "processed", "completed")
    batches = {"total": dict.fromkeys(kinds, 7), "current": dict.fromkeys(kinds, 2)}
    epochs = {kind: {"ready": 3, "started": 3, "completed": 2} for kind in ("total", "current")}
    loops = {"epoch_loop.batch_progress": batches, "epoch_progress": epochs}
    restart_epoch({"loops": {"fit_loop": loops}})
    assert batches == {"total": dict.fromkeys(kinds, 5), "current": dict.fromkeys(kinds, 0)}
    assert all(one == {"ready": 3, "started": 2, "completed": 2} for one in epochs.values())


def test_options_under_which_no_rl_step_is_whole_are_refused_and_defaults_changed() -> None:
    """Scores of validations are known when Lightning looks at them; those of an RL step are not."""

    def set_up(saver: ModelCheckpoint, *stoppers: EarlyStopping) -> Any:
        options = {"checkpoint_callbacks": [saver], "early_stopping_callbacks": stoppers}
        running: Any = SimpleNamespace(num_sanity_val_steps=2, **options)
        make_epochs_whole(running)
        return running

    early = EarlyStopping("rollout/reward", check_on_train_epoch_end=False)
    with pytest.raises(ValueError, match="check_on_train_epoch_end: expected true"):
        set_up(ModelCheckpoint(), early)
    with pytest.raises(ValueError, match="save_on_train_epoch_end: expected true"):
        set_up(ModelCheckpoint(save_on_train_epoch_end=False))
    saver, *stoppers = ModelCheckpoint(), EarlyStopping("rollout/reward"), EarlyStopping("val/loss")
    running = set_up(saver, *stoppers)
    assert running.num_sanity_val_steps == float("inf")
    assert saver._save_on_train_epoch_end
    assert [stopper._check_on_train_epoch_end for stopper in stoppers] == [True, None]
