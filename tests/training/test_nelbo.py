"""The masked diffusion bound against hand values and a loop."""

import math

import pytest
import torch

from lit_dlm.tensors.fused_head import TokenStats, token_stats
from lit_dlm.training.terms import masked_nelbo


def stats_of(logits: torch.Tensor, targets: torch.Tensor, hidden: torch.Tensor) -> TokenStats:
    """Scores of the hidden cells for given logits ``(B, G, V)``: an identity as the head."""
    return token_stats(logits[hidden], torch.eye(logits.shape[-1]), targets[hidden])


def test_by_hand_on_two_rows() -> None:
    """Uniform logits over 4 ids: every hidden cell costs ln 4.

    Row 0 hides 1 of 2 cells, weight 2: 2 ln 4. Row 1 hides 2 of 2, weight 1: 2 ln 4. The sum over
    B G = 4 is ln 4. Of the three targets one is said to be the most probable id.
    """
    hidden = torch.tensor([[True, False], [True, True]])
    stats = stats_of(torch.zeros(2, 2, 4), torch.tensor([[0, 1], [2, 3]]), hidden)
    terms = masked_nelbo(stats._replace(is_top=torch.tensor([False, True, False])), hidden)
    assert float(terms.total) == pytest.approx(math.log(4))
    assert float(terms.parts["cross_entropy"]) == pytest.approx(math.log(4))
    assert float(terms.parts["accuracy"]) == pytest.approx(1 / 3)


@pytest.mark.parametrize("hiding", [0.6, 0.0])
@pytest.mark.parametrize(("B", "G", "V"), [(1, 1, 2), (3, 5, 7), (4, 8, 11)])
def test_equals_a_loop_over_cells(B: int, G: int, V: int, hiding: float) -> None:
    """In value and gradient, of which visible cells get none; without hidden cells all is 0."""
    generator = torch.Generator().manual_seed(B)
    logits = torch.randn(B, G, V, generator=generator).requires_grad_()
    targets = torch.randint(V, (B, G), generator=generator)
    hidden = torch.rand(B, G, generator=generator) < hiding
    expected, right = 0.0 * logits.sum(), 0
    for b in range(B):
        count = int(hidden[b].sum())
        for i in range(G):
            if hidden[b, i]:
                log_prob = logits[b, i].log_softmax(-1)[targets[b, i]]
                expected = expected - log_prob * G / count / (B * G)
                right += int(logits[b, i].argmax() == targets[b, i])
    terms = masked_nelbo(stats_of(logits, targets, hidden), hidden)
    torch.testing.assert_close(terms.total, expected)
    assert float(terms.parts["accuracy"]) == pytest.approx(right / max(int(hidden.sum()), 1))
    found, wanted = (torch.autograd.grad(one, logits) for one in (terms.total, expected))
    torch.testing.assert_close(found, wanted)
