import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lit_dlm.backbones.projection import (
    FeatureSettings,
    PCAFitter,
    Projector,
    ProjectorConfig,
    acceptance_features,
    feature_groups,
    log_odds,
    num_features,
)
from tests.projectors import random_orthogonal, write_release

SMALL = ProjectorConfig(hidden_size=12, hidden_rank=4, delta_rank=2)
RANDOM = replace(SMALL, kind="random_orthogonal")
EIGHT = ProjectorConfig(hidden_size=8, hidden_rank=3, delta_rank=2, kind="random_orthogonal")
PLAIN = FeatureSettings(entropy=False, margin=False)


def test_output_is_snapshots_then_deltas_of_neighbours() -> None:
    """Features of one depth depend on that depth; deltas on the difference of two depths."""
    projector = random_orthogonal(RANDOM)
    assert RANDOM.groups == (4, 4, 4, 2, 2)
    hidden = torch.randn(5, 3, 12)
    z = projector(hidden)
    assert z.shape[-1] == 16
    normalised = torch.nn.functional.layer_norm(hidden, (12,), eps=1e-6)
    delta = torch.nn.functional.layer_norm(hidden[:, 2] - hidden[:, 1], (12,), eps=1e-6)
    torch.testing.assert_close(z[:, 4:8], normalised[:, 1] @ projector.hidden_weight.T)
    torch.testing.assert_close(z[:, 14:], delta @ projector.delta_weight.T)


def test_random_directions_are_orthonormal_and_seeded() -> None:
    first, again, other = (random_orthogonal(RANDOM, seed=seed) for seed in (7, 7, 8))
    torch.testing.assert_close(first.hidden_weight @ first.hidden_weight.T, torch.eye(4))
    assert first.digest() == again.digest() != other.digest()


def test_pca_equals_the_singular_vectors_of_the_centred_rows() -> None:
    """Reference: SVD of all layer-normalised snapshots at once, up to sign and common scale."""
    hidden = torch.randn(200, 3, 10, generator=torch.Generator().manual_seed(1)) * torch.arange(
        1.0, 11.0
    )
    fitter = PCAFitter(ProjectorConfig(hidden_size=10, hidden_rank=3, delta_rank=2))
    for part in hidden.split(60):
        fitter.update(part)
    projector = fitter.finish()
    peak = projector.hidden_weight.abs().argmax(dim=1, keepdim=True)
    assert (projector.hidden_weight.gather(1, peak) > 0).all()  # which fixes the sign
    rows = torch.nn.functional.layer_norm(hidden, (10,), eps=1e-6).reshape(-1, 10).double()
    centred = rows - rows.mean(0)
    directions = torch.linalg.svd(centred, full_matrices=False).Vh[:3]
    ours = torch.nn.functional.normalize(projector.hidden_weight.double(), dim=1)
    torch.testing.assert_close((ours * directions).sum(1).abs(), torch.ones(3).double())
    codes = projector(hidden)[:, :9].reshape(-1, 3)
    # Rounding of a float32 sum over 600 rows.
    torch.testing.assert_close(codes.mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(
        codes.var(0, unbiased=False).mean(), torch.tensor(1.0), atol=1e-5, rtol=0
    )


def test_a_saved_projector_loads_equal_or_is_refused_with_changed_weights(tmp_path: Path) -> None:
    fitter = PCAFitter(SMALL)
    fitter.update(torch.randn(50, 3, 12))
    fitted = fitter.finish()
    fitted.save(tmp_path)
    loaded, hidden = Projector.load(tmp_path), torch.randn(7, 3, 12)
    assert loaded.digest() == fitted.digest()
    assert torch.equal(loaded(hidden), fitted(hidden))
    weights = (tmp_path / "projector.safetensors").read_bytes()
    random_orthogonal(RANDOM).save(tmp_path)
    (tmp_path / "projector.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match=r"damaged, or projector\.json and"):
        Projector.load(tmp_path)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 4 positions"):
        PCAFitter(SMALL).finish()
    with pytest.raises(ValueError, match=r"hidden_rank.*\[1, 96\].*256"):
        ProjectorConfig(hidden_size=96)


@pytest.mark.parametrize("inner", [0, 7])
def test_the_released_autoencoder_loads_as_a_projector(tmp_path: Path, inner: int) -> None:
    """Slow reference: its normalisations and encoders applied one snapshot at a time."""
    path, network = write_release(tmp_path, inner)
    projector = Projector.load(path)
    assert projector.config.groups == (4, 4, 4, 2, 2)
    # Small deltas, where the eps of the normalisation counts.
    hidden = torch.randn(5, 1, 12) + 0.01 * torch.randn(5, 3, 12)
    expected = [network["hidden_encoder"](network["hidden_norm"](hidden[:, k])) for k in range(3)]
    expected += [
        network["delta_encoder"](network["delta_norm"](hidden[:, k + 1] - hidden[:, k]))
        for k in range(2)
    ]
    torch.testing.assert_close(projector(hidden), torch.cat(expected, 1))
    projector.save(tmp_path / "ours")
    assert Projector.load(tmp_path / "ours").digest() == projector.digest()


def test_other_content_of_a_released_file_is_refused(tmp_path: Path) -> None:
    path, _ = write_release(tmp_path)
    whole = torch.load(path, weights_only=True)
    for stored in (
        {**whole, "autoencoder_config": {"d_model": 13}},
        {**whole, "projection_state": {"hidden_norm": {}}},
        {"weight": torch.zeros(2)},
    ):
        torch.save(stored, path)
        with pytest.raises(ValueError, match=r"best_val_loss\.pt: expected what this"):
            Projector.load(path)
    torch.save({"model": torch.nn.Linear(2, 2)}, path)
    for content in (path.read_bytes(), b"hello world\n", b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="not a checkpoint of tensors"):
            Projector.load(path)


def test_without_hidden_states_the_scalars_are_all_that_is_shown() -> None:
    torch.manual_seed(0)
    projector = random_orthogonal(ProjectorConfig(hidden_size=8, hidden_rank=3, delta_rank=2))
    scores = {"entropy": torch.rand(5), "margin": torch.rand(5)}
    hidden, prob = torch.randn(5, 3, 8), torch.rand(5)
    both, alone = (
        acceptance_features(
            projector, hidden, prob, settings=FeatureSettings(hidden=shown), **scores
        )
        for shown in (True, False)
    )
    assert alone.shape[-1] == num_features(projector.config, FeatureSettings(hidden=False)) == 3
    torch.testing.assert_close(both[:, -3:], alone)


def test_published_feature_count_is_833_and_groups_follow_the_feature_order() -> None:
    assert num_features(ProjectorConfig(hidden_size=3584), PLAIN) == 833
    assert feature_groups(EIGHT, FeatureSettings()) == (3, 3, 3, 2, 2, 1, 1, 1)
    assert feature_groups(EIGHT, PLAIN) == (3, 3, 3, 2, 2, 1)


def test_log_odds_are_exact_and_clipped() -> None:
    """log(0.9 / 0.1) = log 9; 0 and 1 are clipped at 10."""
    values = log_odds(torch.tensor([0.9, 0.5, 0.0, 1.0]))
    expected = torch.tensor([math.log(9.0), 0.0, -10.0, 10.0])
    torch.testing.assert_close(values, expected)


def test_features_are_projection_then_scalars_and_finite_without_a_proposal() -> None:
    projector = random_orthogonal(EIGHT)
    hidden, prob = torch.randn(2, 5, 3, 8), torch.rand(2, 5)
    entropy, margin = torch.rand(2, 5), torch.rand(2, 5)
    features = acceptance_features(
        projector, hidden, prob, settings=FeatureSettings(), entropy=entropy, margin=margin
    )
    scalars = torch.stack([log_odds(prob), entropy, log_odds(margin)], dim=-1)
    assert torch.equal(features, torch.cat([projector(hidden), scalars], dim=-1))
    nothing = torch.zeros(1, 1, 3, 8), torch.tensor([[torch.nan]])
    features = acceptance_features(projector, *nothing, settings=PLAIN)
    assert features.isfinite().all()
    assert features[0, 0, -1] == 0.0
