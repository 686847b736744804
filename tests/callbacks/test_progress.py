"""What the progress bar, or the log without a terminal, says of a whole run."""

import csv
import io
import logging
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, LambdaCallback, RichProgressBar
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from torch.optim.lr_scheduler import LambdaLR
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
            texts.append(bar.progress.tasks[0].description.partition(": ")[0])
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "second.ckpt")

        after = LambdaCallback(on_train_batch_end=note)
        trainer = quiet(
            tmp_path, callbacks=[TrainingLog(), bar, after], enable_progress_bar=True, **limits
        )
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
    """The loss is 1 in the first step, then 0; the rate falls to 0 after the last one."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = LambdaLR(optimizer, lambda step: 1 - step / 8)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def training_step(self, batch: Any) -> torch.Tensor:
        shown = {"train/loss": 9.0, "rollout/correct": 0.75, "rollout/reward": 0.5}
        others = dict.fromkeys(("train/entropy", "time/reward", "val/static/reward"), 9.0)
        self.log_dict(shown | others)
        return super().training_step(torch.zeros(())) + float(self.global_step == 0)


@pytest.mark.parametrize("bar", [False, True])
def test_training_tells_its_values_without_a_terminal(
    clock: Mock,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    bar: bool,
) -> None:
    """Eight batches of 20 tokens and 10 s; eight steps are fewer than are logged by default, 50.
    A loss of 1 has a weight of 0.9 ** n after n more steps; the rate is that of the step that was
    made. Nothing is drawn into what is no terminal."""
    loader = DataLoader([Tokens()] * NUM_BATCHES, batch_size=None, collate_fn=lambda one: one)
    with caplog.at_level(logging.INFO, logger="lit_dlm.callbacks.progress"):
        callbacks = [TrainingLog(), *([ProgressBar()] if bar else [])]
        options = {"logger": CSVLogger(tmp_path, name="", version=""), "enable_progress_bar": bar}
        trainer = quiet(tmp_path, callbacks=callbacks, max_epochs=2, **options)
        trainer.fit(Logging(clock), loader)
    values = "tokens/s 2, loss {}, accuracy 0.75, reward 0.5, lr {}"
    lines = [r.getMessage() for r in caplog.records if r.name == "lit_dlm.callbacks.progress"]
    assert lines == [
        "training 1 of 1 parameters",
        f"Epoch 1 of 2, step 3, 0:00:50 left: {values.format('0.81', '0.075')}",
        f"Epoch 2 of 2, step 6, 0:00:20 left: {values.format('0.5905', '0.0375')}",
        f"8 steps in 0:01:20: {values.format('0.4783', '0.0125')}",
        f"Logs: {tmp_path}/",
    ]
    with (tmp_path / "metrics.csv").open() as file:
        assert [row["train/loss"] for row in csv.DictReader(file)] == ["9.0"]
    assert capsys.readouterr().out == ""


def test_the_bar_fits_a_line_of_80_columns(
    clock: Mock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    screen = io.StringIO()
    console = Console(file=screen, width=80, force_terminal=True, color_system=None)
    for place in ("lit_dlm.callbacks.progress", RichProgressBar.__module__):
        monkeypatch.setattr(f"{place}.get_console", lambda: console)
    monkeypatch.setattr(f"{RichProgressBar.__module__}.reconfigure", lambda **_: None)
    loader = DataLoader([Tokens()] * 2_000, batch_size=None, collate_fn=lambda one: one)
    callbacks = [TrainingLog(), ProgressBar()]
    options = {"max_steps": 20_000, "max_epochs": 100, "limit_train_batches": 3}
    trainer = quiet(tmp_path, callbacks=callbacks, enable_progress_bar=True, **options)
    trainer.fit(Logging(clock), loader)
    module = trace_module(capture=False)
    for name in list(module.decoders):
        module.decoders[f"{name}_of_a_very_long_name_{'x' * 40}"] = module.decoders.pop(name)
    trainer = quiet(tmp_path, callbacks=callbacks, enable_progress_bar=True)
    data = PromptDataModule([Letters(4)], response_length=LENGTH)
    trainer.predict(module, datamodule=data, return_predictions=False)
    lines = [line for line in re.split(r"\x1b\[[^m]*?[A-Za-z]|[\r\n]", screen.getvalue()) if line]
    assert all(len(line) <= 80 for line in lines)
    begins = {line.lstrip("━╸╺ ").split(" ")[0] for line in lines}
    assert begins <= {"Epoch", "0", "4", "8", ""}  # each is the beginning of a line
    assert any("loss 0.0" in line and "…" in line for line in lines)
    assert any("8 of 8 prompts (100 %)" in line for line in lines)


def test_the_curves_are_in_the_folder_of_the_run(
    clock: Mock, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    loader = DataLoader([Tokens()] * NUM_BATCHES, batch_size=None, collate_fn=lambda one: one)
    options = {"logger": CSVLogger(tmp_path, name="logs"), "log_every_n_steps": 1}
    with caplog.at_level(logging.INFO, logger="lit_dlm.callbacks.progress"):
        trainer = quiet(tmp_path, callbacks=[TrainingLog()], max_epochs=1, **options)
        trainer.fit(Logging(clock), loader)
    told = [record.getMessage() for record in caplog.records][-2:]
    assert told == [f"Logs: {tmp_path}/logs/version_0", f"Curves: {tmp_path}/curves.png"]
    assert (tmp_path / "curves.png").is_file()


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
        assert filled == [0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0]
        assert not lines
    else:
        assert lines == [
            "0 of 8 prompts (38 %), 0:00:50 left: letters · confidence",
            "4 of 8 prompts (75 %), 0.3 tokens/s, 0:00:20 left: letters · random",
        ]
