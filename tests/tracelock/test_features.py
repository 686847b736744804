import math

import torch

from lit_dlm.backbones.projection import (
    FeatureSettings,
    ProjectorConfig,
    acceptance_features,
    feature_groups,
    log_odds,
    num_features,
)
from tests.projectors import random_orthogonal

CONFIG = ProjectorConfig(hidden_size=8, hidden_rank=3, delta_rank=2, kind="random_orthogonal")
PLAIN = FeatureSettings(entropy=False, margin=False)


def test_published_feature_count_is_833_and_groups_follow_the_feature_order() -> None:
    assert num_features(ProjectorConfig(hidden_size=3584), PLAIN) == 833
    assert feature_groups(CONFIG, FeatureSettings()) == (3, 3, 3, 2, 2, 1, 1, 1)
    assert feature_groups(CONFIG, PLAIN) == (3, 3, 3, 2, 2, 1)


def test_log_odds_are_exact_and_clipped() -> None:
    """log(0.9 / 0.1) = log 9; 0 and 1 are clipped at 10."""
    values = log_odds(torch.tensor([0.9, 0.5, 0.0, 1.0]))
    expected = torch.tensor([math.log(9.0), 0.0, -10.0, 10.0])
    torch.testing.assert_close(values, expected)


def test_features_are_projection_then_scalars_and_finite_without_a_proposal() -> None:
    projector = random_orthogonal(CONFIG)
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
