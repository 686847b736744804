"""Projectors that are trained as the encoders of an autoencoder."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_dlm.backbones.projection import Projector, ProjectorConfig
from lit_dlm.datamodules.trajectories import TrajectoryDataModule
from lit_dlm.tracelock.autoencoder import AutoencoderModule
from lit_dlm.training.steps import NonFiniteError
from tests.finetuning.runs import quiet, trained
from tests.traces import recorded, small_backbone, write_shards

CONFIG = ProjectorConfig(hidden_size=16, hidden_rank=6, delta_rank=3)


@pytest.fixture
def data(tmp_path: Path) -> TrajectoryDataModule:
    folder = write_shards(tmp_path / "shards", recorded(small_backbone(), 24))
    return TrajectoryDataModule(folder, source="tokens", batch_size=8, val_fraction=0.3)


@pytest.fixture
def module() -> AutoencoderModule:
    torch.manual_seed(0)
    return AutoencoderModule(
        small_backbone(),
        hidden_rank=8,
        delta_rank=4,
        dropout=0.0,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
    )


@pytest.mark.slow
def test_training_lowers_the_error_and_exports_the_best_encoders(
    module: AutoencoderModule, data: TrajectoryDataModule, tmp_path: Path
) -> None:
    """The untrained error is about 1, the variance of a normalised entry."""
    saver = ModelCheckpoint(tmp_path / "saved", monitor="val/loss", filename="{step}")
    options: dict[str, Any] = {"val_check_interval": 5, "check_val_every_n_epoch": None}
    trainer = quiet(tmp_path, max_steps=40, enable_checkpointing=True, callbacks=[saver], **options)
    trainer.fit(module, data)
    assert float(saver.best_model_score) < 1.0
    projector = Projector.load(tmp_path / "projector")
    assert projector.config.kind == "autoencoder"
    stored = torch.load(saver.best_model_path, weights_only=True)["state_dict"]
    assert torch.equal(projector.hidden_weight, stored["autoencoder.hidden_encoder.weight"])
    assert not [key for key in stored if key.startswith("backbone")]
    assert not any(p.requires_grad for p in module.backbone.parameters())


def test_exported_projector_is_the_encoder_and_the_error_is_on_normalised_vectors(
    module: AutoencoderModule, tmp_path: Path
) -> None:
    """Zeroed decoders rebuild nothing: the error is the variance of a normalised entry, 1."""
    coder, hidden = module.eval().autoencoder, torch.randn(50, 3, 16) * 3 + 1
    module.export(tmp_path)
    normal = torch.nn.functional.layer_norm(hidden, (16,), eps=1e-6)
    delta = torch.nn.functional.layer_norm(hidden[:, 1:] - hidden[:, :-1], (16,), eps=1e-6)
    expected = [coder.hidden_encoder(normal).flatten(1), coder.delta_encoder(delta).flatten(1)]
    torch.testing.assert_close(Projector.load(tmp_path)(hidden), torch.cat(expected, dim=1))
    for decoder in (coder.hidden_decoder, coder.delta_decoder):
        torch.nn.utils.vector_to_parameters(torch.zeros(10_000), decoder.parameters())
    errors = {name: value.item() for name, value in coder(hidden).items()}
    assert (errors["hidden"], errors["delta"]) == pytest.approx((1.0, 1.0), abs=1e-3)


def test_a_gradient_that_is_not_finite_ends_the_run(
    module: AutoencoderModule, data: TrajectoryDataModule, tmp_path: Path
) -> None:
    next(module.autoencoder.parameters()).register_hook(lambda gradient: gradient * torch.inf)
    before = trained(module)
    with pytest.raises(NonFiniteError, match="a gradient is not finite at optimiser step 0; weigh"):
        quiet(tmp_path, max_steps=3).fit(module, data)
    torch.testing.assert_close(trained(module), before, rtol=0, atol=0)
    assert not (tmp_path / "projector").exists()
