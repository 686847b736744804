"""Complements, views and masked prompts: what they hide, and that every token is covered."""

from functools import partial
from typing import Any

import pytest
import torch

from lit_dlm.backbones import BackboneSpec
from lit_dlm.training.layout import lay_out
from lit_dlm.training.masking import CoupledMasking, CoupledViews, MaskedPrompt
from tests.training.reference import responses as answers

responses = partial(answers, B=6, G=10, answer=7)


@pytest.mark.parametrize("level", ["row", "block", "token"])
def test_a_coupled_pair_covers_each_token_once(level: Any) -> None:
    blocks = torch.arange(10).div(4, rounding_mode="floor").expand(6, -1)
    given = responses(blocks=blocks)
    states = CoupledMasking(level=level, pairs=3).states(given)
    assert states.response.tolist() == [row for row in range(6) for _ in range(6)]
    pairs = states.supervised.unflatten(0, (6, 3, 2))
    assert pairs.sum(2).equal(given.maskable[:, None].expand(-1, 3, -1).long())
    assert states.hidden.equal(states.supervised | ~given.maskable[states.response])
    # Pairs of one sample differ.
    assert not pairs[:, 0].equal(pairs[:, 1])
    torch.testing.assert_close(states.weight.sum(1), states.supervised.any(1).float())


def test_noise_of_complementary_masks_may_be_that_of_fast_dllm() -> None:
    """At levels near 1 the complement is empty; every target weighs the same."""
    states = CoupledMasking(min_t=1.0, max_t=1.0, weight="none").states(responses())
    assert not states.supervised[1::2].any()
    assert states.weight is None


def test_views_average_a_full_and_a_partial_estimate() -> None:
    """Factors 1/2 in the first view, 1/2t and 1/2(1 - t) in the others.

    The inverses of the last two, halved, add up to t + (1 - t).
    """
    given = responses()
    states = CoupledViews().states(given)
    views = states.supervised.unflatten(0, (6, 3))
    assert views[:, 0].equal(given.maskable)
    assert (views[:, 1] ^ views[:, 2]).equal(given.maskable)
    assert states.response.tolist() == [row for row in range(6) for _ in range(3)]
    factor = states.coefficient.unflatten(0, (6, 3))
    assert set(factor[:, 0].unique().tolist()) == {0.0, 0.5}
    first, second = factor[:, 1].amax(1), factor[:, 2].amax(1)
    both = (first > 0) & (second > 0)
    assert both.sum() >= 4
    t, rest = 1 / (2 * first[both]), 1 / (2 * second[both])
    torch.testing.assert_close(t + rest, torch.ones_like(t))
    assert ((t >= 0.2) & (t <= 0.8)).all()


def test_masked_prompt_hides_all_of_the_response_and_some_of_the_prompt() -> None:
    spec = BackboneSpec(family="any", mask_id=2, pad_id=0, eos_ids=(1,))

    def hidden(padding: int) -> torch.Tensor:
        """Of prompts of four tokens behind some columns of padding."""
        width = padding + 4
        real = (torch.arange(width + 10) >= padding).expand(400, -1)
        batch = responses(B=400, ids=torch.full((400, width + 10), 5), pad_mask=real, start=width)
        rows = lay_out(batch, MaskedPrompt().states(batch), spec)
        assert (rows.ids[:, width:] == 2).all()
        return rows.ids[:, :width] == 2

    assert not hidden(1)[:, 0].any()
    assert 0.12 < float(hidden(0).float().mean()) < 0.18
    assert hidden(1)[:, 1:].equal(hidden(0))  # it belongs to the token and not to the column
