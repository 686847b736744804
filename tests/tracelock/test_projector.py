"""Projectors: fitted on the states of traces, or trained as the encoders of an autoencoder."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_dlm.backbones.projection import PCAFitter, Projector, ProjectorConfig
from lit_dlm.datamodules.trajectories import TrajectoryDataModule
from lit_dlm.tracelock.autoencoder import AutoencoderModule
from lit_dlm.tracelock.states import cached_projector, state_snapshots, trace_states
from lit_dlm.training.steps import NonFiniteError
from tests.finetuning.runs import quiet, trained
from tests.traces import recorded, small_backbone, small_projector, write_shards

CONFIG = ProjectorConfig(hidden_size=16, hidden_rank=6, delta_rank=3)


def test_fit_is_deterministic_and_sees_response_positions_only() -> None:
    """Reference: the same states one by one, without padding, response rows picked by hand."""
    backbone = small_backbone()
    traces = recorded(backbone, 6)
    one, again, by_hand = fitters = [PCAFitter(CONFIG) for _ in range(3)]
    for batch in trace_states(traces):
        for fitter in (one, again):
            fitter.update(state_snapshots(backbone, batch))
        for ids, real in zip(batch.ids, batch.pad_mask, strict=True):
            hidden = backbone.denoise(ids[real][None], hidden_layers=(-3, -2, -1)).hidden
            by_hand.update(hidden[0, int(real[: batch.start].sum()) :])
    first, second, expected = (fitter.finish() for fitter in fitters)
    assert first.digest() == second.digest()
    # Padding changes the order of float32 sums inside the backbone.
    torch.testing.assert_close(first.hidden_weight, expected.hidden_weight, atol=1e-3, rtol=1e-3)


def test_states_are_spread_over_each_trace() -> None:
    """Eight steps in four parts of two: one state in each, so masks 8-7, 6-5, 4-3 and 2-1."""
    traces = recorded(small_backbone(), 5)
    masks = torch.cat([batch.masked.sum(1) for batch in trace_states(traces)])
    assert [(int(m) + 1) // 2 for m in masks] == [4, 3, 2, 1] * 5


def test_projector_of_a_folder_is_fitted_once(tmp_path: Path) -> None:
    calls = []

    def fit() -> Projector:
        calls.append(len(calls))
        return small_projector()

    first, second = (cached_projector(tmp_path / "projector", fit) for _ in range(2))
    assert calls == [0]
    assert first.digest() == second.digest()
    assert [path.name for path in tmp_path.iterdir()] == ["projector"]


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
