"""A run ends at a signal even where an epoch has a single step, and goes on as without it."""

import os
import signal
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lit_dlm.callbacks import Interruption
from tests.finetuning.runs import quiet

pytestmark = pytest.mark.slow  # training runs


class Line(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def training_step(self, batch: Tensor) -> Tensor:
        return ((self.weight * batch).sum() - self.current_epoch).square()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def interrupt(trainer: Trainer, module: LightningModule, *_: object) -> None:
    if trainer.current_epoch == 2:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("every", [1, 10])  # epochs between two checkpoints
def test_epochs_of_one_step_end_at_a_signal_and_resume(tmp_path: Path, every: int) -> None:
    def fitted(*callbacks: LambdaCallback, **options: Path) -> Tensor:
        model = Line()
        saver = ModelCheckpoint(
            tmp_path, filename="last", every_n_epochs=every, enable_version_counter=False
        )
        given = {"callbacks": [saver, Interruption(), *callbacks], "enable_checkpointing": True}
        trainer = quiet(tmp_path, max_epochs=5, **given)
        trainer.fit(model, DataLoader(torch.arange(3.0)[None]), weights_only=True, **options)
        assert trainer.global_step == 5
        return model.weight.detach()

    with pytest.raises(SystemExit) as ended:
        fitted(LambdaCallback(on_train_batch_start=interrupt))
    assert ended.value.code == 128 + signal.SIGTERM
    last = tmp_path / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == 3
    resumed = fitted(ckpt_path=last)
    last.unlink()
    assert torch.equal(resumed, fitted())
