import math

import pytest
import torch

from lit_dlm.backbones.base import Denoised
from lit_dlm.decoding import Sampler
from tests.decoding.states import state_with_masks

NOTHING: frozenset[str] = frozenset()


def _denoised(rows: list[list[float]], columns: list[int]) -> Denoised:
    return Denoised(
        logits=torch.tensor([rows]).log(), columns=torch.tensor([columns], dtype=torch.long)
    )


def test_greedy_proposes_the_arg_max_at_its_column_and_scores_it():
    state = state_with_masks([[1, 1, 1]])
    proposal = Sampler().propose(
        state,
        _denoised([[0.1, 0.2, 0.7], [0.5, 0.3, 0.2]], [4, 2]),
        frozenset({"entropy", "margin"}),
    )
    assert proposal.ids.tolist() == [[0, 0, 0, 0, 2]]
    torch.testing.assert_close(proposal.prob, torch.tensor([[0.0, 0.0, 0.5, 0.0, 0.7]]))
    torch.testing.assert_close(proposal.margin, torch.tensor([[0.0, 0.0, 0.2, 0.0, 0.5]]))
    entropy = -(0.1 * math.log(0.1) + 0.2 * math.log(0.2) + 0.7 * math.log(0.7))
    assert proposal.entropy is not None
    assert proposal.entropy[0, 4].item() == pytest.approx(entropy, abs=1e-6)


def test_only_asked_scores_are_computed():
    proposal = Sampler().propose(
        state_with_masks([[1]]), _denoised([[0.5, 0.3, 0.2]], [2]), NOTHING
    )
    assert proposal.entropy is None
    assert proposal.margin is None


@pytest.mark.parametrize(("score_on", "expected"), [("raw", 0.5), ("filtered", 0.625)])
def test_confidence_is_read_from_the_asked_distribution(score_on, expected):
    """Top-p 0.7 drops the last token: 0.5 / (0.5 + 0.3) = 0.625."""
    proposal = Sampler(top_p=0.7, score_on=score_on).propose(
        state_with_masks([[1]]), _denoised([[0.5, 0.3, 0.2]], [2]), NOTHING
    )
    assert proposal.prob[0, 2].item() == pytest.approx(expected, abs=1e-6)


def test_draws_follow_the_temperature():
    """p ~ (4, 2, 1) ** (1 / T): at T = 2 this is (2, 1.414, 1) / 4.414."""
    state = state_with_masks([[1] * 4000])
    logits = torch.tensor([[4.0, 2.0, 1.0]]).log().expand(1, 4000, 3)
    denoised = Denoised(logits=logits, columns=torch.arange(2, 4002)[None])
    drawn = Sampler(temperature=2.0).propose(state, denoised, NOTHING).ids[0, 2:]
    shares = torch.bincount(drawn, minlength=3) / 4000
    expected = torch.tensor([2.0, math.sqrt(2.0), 1.0]) / (3.0 + math.sqrt(2.0))
    # Standard error at most 0.008.
    torch.testing.assert_close(shares, expected, atol=0.03, rtol=0.0)


def test_top_k_restricts_draws():
    state = state_with_masks([[1] * 500])
    logits = torch.tensor([[4.0, 2.0, 1.0]]).log().expand(1, 500, 3)
    denoised = Denoised(logits=logits, columns=torch.arange(2, 502)[None])
    drawn = Sampler(temperature=5.0, top_k=2).propose(state, denoised, NOTHING).ids[0, 2:]
    assert set(drawn.tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature: expected 0 or more"),
        ({"top_k": 0}, "top_k: expected at least 1"),
        ({"top_p": 0.0}, "top_p: expected a number in"),
    ],
)
def test_bad_settings_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampler(**settings)
