from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_dlm.datamodules.trajectories import TrajectoryDataModule
from lit_dlm.heads.projection import Projector
from lit_dlm.modules.autoencoder import AutoencoderModule
from lit_dlm.modules.steps import NonFiniteError
from tests.finetuning import quiet
from tests.traces import recorded, small_backbone, write_shards


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards"), recorded(small_backbone(), 24))


def module(**options: Any) -> AutoencoderModule:
    torch.manual_seed(0)
    values: dict[str, Any] = {"hidden_rank": 8, "delta_rank": 4, "dropout": 0.0}
    return AutoencoderModule(
        small_backbone(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        **{**values, **options},
    )


def fitted(shards: Path, folder: Path, *, steps: int = 40) -> tuple[AutoencoderModule, Any]:
    model = module()
    saver = ModelCheckpoint(folder / "saved", monitor="val/loss", filename="{step}")
    options = {"val_check_interval": 5, "check_val_every_n_epoch": None, "callbacks": [saver]}
    trainer = quiet(folder, max_steps=steps, enable_checkpointing=True, **options)
    source = TrajectoryDataModule(shards, source="tokens", batch_size=8, val_fraction=0.3)
    trainer.fit(model, datamodule=source)
    return model, saver


@pytest.mark.slow
def test_training_lowers_the_error_and_exports_the_best_encoders(
    shards: Path, tmp_path: Path
) -> None:
    """The untrained error is about 1, the variance of a normalised entry."""
    model, saver = fitted(shards, tmp_path)
    assert float(saver.best_model_score) < 1.0
    projector = Projector.load(tmp_path / "projector")
    assert projector.config.kind == "autoencoder"
    stored = torch.load(saver.best_model_path, weights_only=True)["state_dict"]
    assert torch.equal(projector.hidden_weight, stored["autoencoder.hidden_encoder.weight"])
    assert not [key for key in stored if key.startswith("backbone")]
    assert not any(p.requires_grad for p in model.backbone.parameters())


def test_exported_projector_is_the_encoder(tmp_path: Path) -> None:
    model = module().eval()
    hidden = torch.randn(5, 3, 16)
    model.export(tmp_path)
    projector = Projector.load(tmp_path)
    normal = torch.nn.functional.layer_norm(hidden, (16,), eps=1e-6)
    delta = torch.nn.functional.layer_norm(hidden[:, 1:] - hidden[:, :-1], (16,), eps=1e-6)
    coder = model.autoencoder
    expected = [coder.hidden_encoder(normal).flatten(1), coder.delta_encoder(delta).flatten(1)]
    torch.testing.assert_close(projector(hidden), torch.cat(expected, dim=1))


def test_error_is_the_mean_square_on_normalised_vectors() -> None:
    """Zeroed decoders rebuild nothing: the error is the variance of a normalised entry, 1."""
    coder = module().autoencoder
    with torch.no_grad():
        for decoder in (coder.hidden_decoder, coder.delta_decoder):
            for parameter in decoder.parameters():
                parameter.zero_()
    errors = coder(torch.randn(50, 3, 16) * 3 + 1)
    assert errors["hidden"].item() == pytest.approx(1.0, abs=1e-3)
    assert errors["delta"].item() == pytest.approx(1.0, abs=1e-3)


def test_a_gradient_that_is_not_finite_ends_the_run(shards: Path, tmp_path: Path) -> None:
    model = module()
    next(model.autoencoder.parameters()).register_hook(lambda gradient: gradient * torch.inf)
    before = {name: value.clone() for name, value in model.autoencoder.named_parameters()}
    trainer = quiet(tmp_path, max_steps=3)
    with pytest.raises(NonFiniteError, match="a gradient is not finite at optimiser step 0; weigh"):
        trainer.fit(model, TrajectoryDataModule(shards, source="tokens", batch_size=8))
    for name, value in model.autoencoder.named_parameters():
        assert torch.equal(value, before[name])
    assert not (tmp_path / "projector").exists()
