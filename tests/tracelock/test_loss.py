import math

import pytest
import torch

from lit_dlm.tracelock.loss import (
    AcceptanceLossSettings,
    acceptance_loss,
    acceptance_weights,
    prefix_crop,
)
from tests.training.reference import rows


@pytest.mark.parametrize(
    ("label", "is_gen", "is_tail", "visible", "expected"),
    [
        # Prompt, locked, five masked, and a tail of two, one of them cropped. Masked ranks 0..4,
        # front factor 1 - 0.5 r / 4: 1, .875, .75, .625, .5. Positives keep it, negatives weigh 2.
        # Two tail positions in the whole row: 1/2 for the visible one.
        ("001011011", "001111111", "000000011", "111111110", [0, 0, 1, 2, 0.75, 0.625, 2, 0.5, 0]),
        # Three visible of four masked, locked in between: factors 1, .75, .5.
        ("111111", "101011", "000000", "111110", [1, 0, 0.75, 0, 0.5, 0]),
    ],
)
def test_weights_match_hand_values(label, is_gen, is_tail, visible, expected) -> None:
    weight = acceptance_weights(rows(label), rows(is_gen), rows(is_tail), rows(visible))
    torch.testing.assert_close(weight, torch.tensor([expected]).float())


def test_loss_matches_hand_value() -> None:
    """Logits 1 and 0, tau 1: decisions 0 (label 1) and -1 (label 0), weights 1 and 2.

    BCE: log 2 and log(1 + e^-1); loss = (log 2 + 2 log(1 + e^-1)) / 3 + 0.001 * 1.
    """
    logits, weight = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 2.0]])
    terms = acceptance_loss(logits, torch.tensor([1.0]), rows("10"), weight)
    bce = (math.log(2) + 2 * math.log(1 + math.exp(-1))) / 3
    assert terms.total.item() == pytest.approx(bce + 0.001, rel=1e-6)
    assert terms.parts["bce"].item() == pytest.approx(bce, rel=1e-6)
    assert terms.parts["tau_penalty"].item() == pytest.approx(0.001, rel=1e-6)


def test_gradient_is_zero_outside_the_loss_set() -> None:
    """A row of three masked ones that are seen; an empty loss set gives 0 with a gradient."""
    logits = torch.randn(1, 6, requires_grad=True)
    label, is_gen, visible = rows("001010"), rows("001111"), rows("111110")
    weight = acceptance_weights(label, is_gen, torch.zeros_like(is_gen), visible)
    acceptance_loss(logits, torch.zeros(1), label, weight).total.backward()
    assert (logits.grad[0] != 0).tolist() == [False, False, True, True, True, False]
    logits.grad = None
    nothing = acceptance_loss(logits, torch.zeros(1), label, torch.zeros(1, 6)).total
    nothing.backward()
    assert nothing.item() == 0.0
    assert not logits.grad.any()


def test_crop_keeps_the_prompt_and_the_rounded_share_of_each_response() -> None:
    """Five response columns: ratio 0.5 rounds 2.5 to 2 (half to even), 0.25 to 1, 1 keeps all.

    Half of a response of two in the same batch is one.
    """
    given = rows("0011111", "0011111", "0011111", "0011000")
    visible = prefix_crop(torch.tensor([0.5, 0.25, 1.0, 0.5]), given, given, given)
    assert visible[:3].tolist() == rows("1111000", "1110000", "1111111").tolist()
    assert (visible & given)[3].tolist() == rows("0010000")[0].tolist()


@pytest.mark.parametrize("label", ["0001", "1000"])
def test_crop_is_undone_when_the_prefix_has_no_masked_positive(label: str) -> None:
    """The prefix of two holds a masked negative (or a positive that is already written)."""
    visible = prefix_crop(torch.tensor([0.5]), rows("1111"), rows("0111"), rows(label))
    assert visible.all()


def test_wrong_traces_get_their_own_weight() -> None:
    given = rows("10", "10"), rows("11", "11"), rows("00", "00"), rows("11", "11")
    settings = AcceptanceLossSettings(wrong_trace_weight=0.25)
    is_correct = torch.tensor([True, False])
    weight = acceptance_weights(*given, is_correct=is_correct, settings=settings)
    torch.testing.assert_close(weight, torch.tensor([[1.0, 2.0], [0.25, 0.5]]))
    with pytest.raises(ValueError, match="expected graded traces"):
        acceptance_weights(*given, settings=settings)


def test_mean_of_parts_with_a_common_norm_is_the_loss_of_the_whole() -> None:
    """Two processes with unequal sums of weights, and one with the whole batch."""
    torch.manual_seed(0)
    logits, tau, label = torch.randn(4, 5), torch.randn(4), torch.rand(4, 5) > 0.5
    weight = torch.rand(4, 5) * torch.tensor([1.0, 2.0, 0.1, 0.0])[:, None]
    whole = acceptance_loss(logits, tau, label, weight).total
    parts = [
        acceptance_loss(logits[at], tau[at], label[at], weight[at], norm=weight.sum() / 2).total
        for at in (slice(0, 2), slice(2, 4))
    ]
    torch.testing.assert_close(sum(parts) / 2, whole)
