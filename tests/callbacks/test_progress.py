"""What the progress bar, or the log without a terminal, says of a whole run."""

import csv
import logging
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from torch.utils.data import DataLoader

from lit_dlm.callbacks import ProgressBar, TrainingLog
from lit_dlm.datamodules import PromptDataModule
from tests.callbacks.letters import LENGTH, Letters, trace_module
from tests.fakes import TableBackbone, logits_for
from tests.finetuning.runs import quiet

NUM_BATCHES = 4


class Model(LightningModule):
    """Ten seconds pass with every training batch."""

    def __init__(self, clock: Mock) -> None:
        super().__init__()
        self.clock = clock
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.clock.return_value += 10.0
        return (self.weight * batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Mock:
    clock = Mock(return_value=1000.0)
    monkeypatch.setattr("lit_dlm.callbacks.progress.time.monotonic", clock)
    return clock


def test_time_left_is_that_of_the_run(
    clock: Mock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two epochs of four batches of 10 s: after three batches, 50 s are left. Where steps end a run
    without epochs, the second of six leaves 40 s."""
    monkeypatch.setattr(Console, "is_terminal", True)

    def heard(resume: Path | None = None, **limits: int) -> list[str]:
        """The description after every batch."""
        bar, texts = ProgressBar(), []

        def note(trainer: Trainer, *_: Any) -> None:
            texts.append(bar.train_progress_bar.description)
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "second.ckpt")

        after = LambdaCallback(on_train_batch_end=note)
        trainer = quiet(tmp_path, callbacks=[bar, after], enable_progress_bar=True, **limits)
        loader = DataLoader(torch.ones(NUM_BATCHES, 1))
        trainer.fit(Model(clock), loader, ckpt_path=resume, weights_only=True)
        return texts

    texts = heard(max_epochs=2)
    assert texts[2] == "Epoch 1 of 2, step 3, 0:00:50 left"
    assert texts[4] == "Epoch 2 of 2, step 5, 0:00:30 left"
    assert texts[-1] == "Epoch 2 of 2, step 8"
    texts = heard(max_epochs=-1, max_steps=6)
    assert texts[1] == "Epoch 1, step 2 of 6, 0:00:40 left"
    assert texts[4] == "Epoch 2, step 5 of 6, 0:00:10 left"
    # The first two steps, and the time that they took, are not this run's.
    heard(max_epochs=2)
    assert heard(tmp_path / "second.ckpt", max_epochs=2)[1] == "Epoch 1 of 2, step 4, 0:00:40 left"


class Tokens:
    """A batch of 20 tokens."""

    ids = torch.zeros(4, 5)


class Logging(Model):
    def training_step(self, batch: Any) -> torch.Tensor:
        shown = {"train/loss": 0.25, "rollout/correct": 0.75, "rollout/reward": 0.5}
        others = dict.fromkeys(("train/entropy", "time/reward", "val/static/reward"), 9.0)
        self.log_dict(shown | others)
        return super().training_step(torch.ones(()))


@pytest.mark.parametrize("bar", [False, True])
def test_training_tells_its_values_without_a_terminal(
    clock: Mock,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    bar: bool,
) -> None:
    """Eight batches of 20 tokens and 10 s; eight steps are fewer than are logged by default, 50.
    Nothing is drawn into what is no terminal."""
    loader = DataLoader([Tokens()] * NUM_BATCHES, batch_size=None, collate_fn=lambda one: one)
    with caplog.at_level(logging.INFO, logger="lit_dlm.callbacks.progress"):
        callbacks = [TrainingLog(), *([ProgressBar()] if bar else [])]
        options = {"logger": CSVLogger(tmp_path, name="", version=""), "enable_progress_bar": bar}
        trainer = quiet(tmp_path, callbacks=callbacks, max_epochs=2, **options)
        trainer.fit(Logging(clock), loader)
    values = "loss 0.25, accuracy 0.75, reward 0.5, lr 0.1, tokens/s 2"
    lines = [r.getMessage() for r in caplog.records if r.name == "lit_dlm.callbacks.progress"]
    assert lines == [
        "training 1 of 1 parameters",
        f"Epoch 1 of 2, step 3, 0:00:50 left: {values}",
        f"Epoch 2 of 2, step 6, 0:00:20 left: {values}",
        f"8 steps in 0:01:20: {values}",
    ]
    with (tmp_path / "metrics.csv").open() as file:
        assert [row["train/loss"] for row in csv.DictReader(file)] == ["0.25"]
    assert capsys.readouterr().out == ""


class Cells(TableBackbone):
    """Ten seconds pass with every forward."""

    def __init__(self, clock: Mock) -> None:
        super().__init__(logits_for([5, 6, 40, 41, 42, 43], [0.5] * 6, vocab_size=300))
        self.clock = clock

    def denoise(self, ids: torch.Tensor, **options: Any) -> Any:
        self.clock.return_value += 10.0
        return super().denoise(ids, **options)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_decoding_tells_how_far_it_is_within_a_batch(
    clock: Mock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    is_terminal: bool,
) -> None:
    """Two methods, a batch of four rows each, four cells a row: a step is an eighth of the run."""
    monkeypatch.setattr(Console, "is_terminal", is_terminal)
    module = trace_module(capture=False)
    module.backbone = Cells(clock)
    bar, filled = ProgressBar(), []
    steps = type("Steps", (Callback,), {})()
    steps.on_decode_step = lambda *_: filled.append(
        bar.progress and bar.progress.tasks[0].completed
    )
    trainer = quiet(tmp_path, callbacks=[TrainingLog(), bar, steps], enable_progress_bar=True)
    with caplog.at_level(logging.INFO, logger="lit_dlm.callbacks.progress"):
        data = PromptDataModule([Letters(4)], response_length=LENGTH)
        trainer.predict(module, datamodule=data, return_predictions=False)
    lines = [r.getMessage() for r in caplog.records if r.name == "lit_dlm.callbacks.progress"]
    if is_terminal:
        assert filled == [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0]
        assert not lines
    else:
        assert lines == [
            "letters · confidence, 37.5 % of 2 batches, 0:00:50 left",
            "letters · random, 75.0 % of 2 batches, 0:00:20 left",
        ]
