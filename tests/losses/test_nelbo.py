"""The masked diffusion bound against hand values and a loop."""

import math

import pytest
import torch

from lit_dlm.losses.nelbo import masked_nelbo


def test_by_hand_on_two_rows() -> None:
    """Uniform logits over 4 ids: every hidden cell costs ln 4.

    Row 0 hides 1 of 2 cells, weight 2: 2 ln 4. Row 1 hides 2 of 2, weight 1: 2 ln 4. The sum over
    B G = 4 is ln 4. The first id wins ties, so the accuracy is that of target 0: 1 of 3.
    """
    hidden = torch.tensor([[True, False], [True, True]])
    terms = masked_nelbo(torch.zeros(2, 2, 4), torch.tensor([[0, 1], [2, 3]]), hidden)
    assert float(terms.total) == pytest.approx(math.log(4))
    assert float(terms.parts["cross_entropy"]) == pytest.approx(math.log(4))
    assert float(terms.parts["accuracy"]) == pytest.approx(1 / 3)


@pytest.mark.parametrize(("B", "G", "V"), [(1, 1, 2), (3, 5, 7), (4, 8, 11)])
def test_equals_a_loop_over_cells(B: int, G: int, V: int) -> None:
    generator = torch.Generator().manual_seed(B)
    logits = torch.randn(B, G, V, generator=generator)
    targets = torch.randint(V, (B, G), generator=generator)
    hidden = torch.rand(B, G, generator=generator) < 0.6
    expected = 0.0
    for b in range(B):
        count = int(hidden[b].sum())
        for i in range(G):
            if hidden[b, i]:
                log_prob = float(logits[b, i].log_softmax(-1)[targets[b, i]])
                expected -= log_prob * G / count / (B * G)
    assert float(masked_nelbo(logits, targets, hidden).total) == pytest.approx(expected, rel=1e-5)


def test_visible_cells_get_no_gradient_and_forbidden_ids_none_either() -> None:
    logits = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    hidden = torch.tensor([[True, False, True]])
    forbidden = torch.tensor([False, False, False, True])
    blocked = logits.masked_fill(forbidden, float("-inf"))
    masked_nelbo(blocked, torch.tensor([[0, 1, 2]]), hidden).total.backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 1].eq(0).all()
    assert logits.grad[..., 3].eq(0).all()
    assert logits.grad[0, 0, 0] < 0


def test_rows_without_hidden_cells_count_as_zero() -> None:
    terms = masked_nelbo(
        torch.zeros(2, 1, 2), torch.zeros(2, 1, dtype=torch.long), torch.tensor([[True], [False]])
    )
    assert float(terms.total) == pytest.approx(math.log(2) / 2)


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"expected logits \(B, G, V\)"):
        masked_nelbo(torch.zeros(1, 2, 3), torch.zeros(1, 3).long(), torch.ones(1, 3).bool())
