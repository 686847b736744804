import math

import torch

from lit_dlm.heads.projection import (
    FeatureSettings,
    Projector,
    ProjectorConfig,
    acceptance_features,
    feature_groups,
    log_odds,
    num_features,
)

CONFIG = ProjectorConfig(hidden_size=8, hidden_rank=3, delta_rank=2, kind="random_orthogonal")
PLAIN = FeatureSettings(entropy=False, margin=False)


def test_published_feature_count_is_833() -> None:
    assert num_features(ProjectorConfig(hidden_size=3584), PLAIN) == 833


def test_groups_follow_the_feature_order() -> None:
    assert feature_groups(CONFIG, FeatureSettings()) == (3, 3, 3, 2, 2, 1, 1, 1)
    assert feature_groups(CONFIG, PLAIN) == (3, 3, 3, 2, 2, 1)


def test_log_odds_are_exact_and_clipped() -> None:
    """log(0.9 / 0.1) = log 9; 0 and 1 are clipped at 10."""
    values = log_odds(torch.tensor([0.9, 0.5, 0.0, 1.0]))
    expected = torch.tensor([math.log(9.0), 0.0, -10.0, 10.0])
    torch.testing.assert_close(values, expected)


def test_features_are_projection_then_scalars() -> None:
    projector = Projector.random_orthogonal(CONFIG)
    hidden, prob = torch.randn(2, 5, 3, 8), torch.rand(2, 5)
    entropy, margin = torch.rand(2, 5), torch.rand(2, 5)
    features = acceptance_features(
        projector, hidden, prob, settings=FeatureSettings(), entropy=entropy, margin=margin
    )
    assert torch.equal(features[..., :13], projector(hidden))
    assert torch.equal(features[..., 13], log_odds(prob))
    assert torch.equal(features[..., 14], entropy)
    assert torch.equal(features[..., 15], log_odds(margin))


def test_position_without_a_proposal_has_finite_features() -> None:
    projector = Projector.random_orthogonal(CONFIG)
    features = acceptance_features(
        projector, torch.zeros(1, 1, 3, 8), torch.tensor([[float("nan")]]), settings=PLAIN
    )
    assert features.isfinite().all()
    assert features[0, 0, -1] == 0.0
