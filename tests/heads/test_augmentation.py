import pytest
import torch

from lit_dlm.heads.augmentation import FeatureNoise, noisy_features


def states() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    features = torch.randn(4, 50, 6) * torch.arange(1, 7)
    present = torch.ones(4, 50, dtype=torch.bool)
    present[:, :5] = False
    return features, present & (torch.arange(50) >= 20), present


def test_no_noise_returns_the_input() -> None:
    features, in_response, present = states()
    assert noisy_features(features, in_response, present, FeatureNoise()) is features


def test_gaussian_noise_follows_the_spread_of_each_feature() -> None:
    """Feature k has standard deviation k; a tenth of it is added: the added part has k / 10."""
    features, in_response, present = states()
    added = noisy_features(features, in_response, present, FeatureNoise(gaussian_ratio=0.1))
    spread = (added - features).flatten(0, 1).std(0)
    torch.testing.assert_close(spread, torch.arange(1.0, 7.0) / 10, rtol=0.15, atol=0.0)


def test_swapped_noise_has_the_asked_ratio_and_stays_in_the_response() -> None:
    """10 dB: the power of the noise is a tenth of the position's own."""
    features, in_response, present = states()
    noise = FeatureNoise(swap_prob=1.0, swap_snr_db=10.0)
    added = noisy_features(features, in_response, present, noise) - features
    assert not added[~in_response].any()
    power = added[in_response].square().sum(-1) / features[in_response].square().sum(-1)
    torch.testing.assert_close(power, torch.full_like(power, 0.1), rtol=1e-3, atol=0.0)


def test_swaps_hit_the_asked_share() -> None:
    features, in_response, present = states()
    noise = FeatureNoise(swap_prob=0.25)
    hit = (noisy_features(features, in_response, present, noise) != features).any(-1)
    assert 0.1 < hit[in_response].float().mean() < 0.4


@pytest.mark.parametrize("option", ["gaussian_ratio", "swap_prob"])
def test_bad_amounts_are_named(option: str) -> None:
    with pytest.raises(ValueError, match=rf"FeatureNoise\.{option}"):
        FeatureNoise(**{option: -0.5})
