"""The clipped objective and its divergence, by hand and through their gradients."""

import math

import pytest
import torch

from lit_dlm.rl.policy_losses import ClippedPolicyLoss, k3


def test_clipping_by_hand() -> None:
    """eps 0.2. A = 1: ratios 1.5 and 0.5 give 1.2 and 0.5. A = -1: they give -1.5 and -0.8.

    A clipped token has no gradient, any other minus its ratio times its advantage.
    """
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5])
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0])
    expected = torch.tensor([1.2, 0.5, -1.5, -0.8])
    log_prob = ratio.log().requires_grad_()
    loss = ClippedPolicyLoss(beta=0.0)
    terms = loss.compute(log_prob, torch.zeros(4), advantage, torch.ones(4))
    terms.total.backward()
    torch.testing.assert_close(terms.total, -expected.sum())
    torch.testing.assert_close(log_prob.grad, torch.tensor([0.0, -0.5, 1.5, 0.0]))
    assert terms.parts["clip_fraction"] == 0.5
    zero = torch.zeros(1)  # a huge ratio stays finite
    terms = ClippedPolicyLoss().compute(zero, zero - 200.0, zero - 1.0, zero + 1.0)
    assert terms.total.isfinite()


def test_divergence_is_never_negative_and_zero_at_equality() -> None:
    """d = log 2: 1/2 - 1 + log 2; d = -log 2: 2 - 1 - log 2."""
    same = torch.tensor([-3.0, 0.0])
    assert k3(same, same).tolist() == [0.0, 0.0]
    two = math.log(2.0)
    found = k3(torch.tensor([two, -two]), torch.zeros(2))
    torch.testing.assert_close(found, torch.tensor([two - 0.5, 1.0 - two]))
    assert (k3(torch.randn(100), torch.randn(100)) >= 0).all()


def test_tokens_without_weight_take_no_part() -> None:
    """A copy that only fills a batch may hold anything, an infinite score included."""
    log_prob = torch.tensor([-1.0, -math.inf], requires_grad=True)
    terms = ClippedPolicyLoss(beta=0.1).compute(
        log_prob,
        torch.tensor([-1.0, 0.0]),
        torch.tensor([2.0, 5.0]),
        torch.tensor([1.0, 0.0]),
        reference=torch.tensor([-1.5, 0.0]),
        kl_weight=torch.tensor([2.0, 0.0]),
    )
    # -2 for the policy; the divergence at 0.5 is exp(-0.5) - 0.5, and its slope 1 - exp(-0.5).
    less = math.exp(-0.5)
    torch.testing.assert_close(terms.total, torch.tensor(-2.0 + 0.1 * 2.0 * (less - 0.5)))
    terms.total.backward()
    torch.testing.assert_close(log_prob.grad, torch.tensor([-2.0 + 0.1 * 2.0 * (1 - less), 0.0]))
    assert all(value.isfinite() for value in terms.parts.values())


@pytest.mark.parametrize(("options", "bound"), [({}, 2.5), ({"max_fall": None}, math.inf)])
def test_a_token_that_was_given_up_is_held_but_does_not_decide_the_update(
    options: dict[str, None], bound: float
) -> None:
    """d = -12: ``exp(12)`` would be 160,000 nats; the tangent at -2.5 is 8.7 + 9.5 * 11.2.

    Without a bound the divergence is dLLM-RL's, ``exp(-d) - 1 + d``, however far a token fell.
    """
    log_prob = torch.tensor([-13.0, -3.6, -0.5], dtype=torch.float64, requires_grad=True)
    old, zero = torch.full_like(log_prob, -1.0).detach(), torch.zeros(3, dtype=torch.float64)
    loss = ClippedPolicyLoss(beta=0.5, **options)
    total = loss.compute(log_prob, old, zero, zero + 1.0).total
    total.backward()
    value, slopes = 0.0, []
    for fall in (12.0, 2.6, -0.5):
        held = min(fall, bound)
        slopes.append(1.0 - math.exp(held))
        value += math.exp(held) - 1.0 - held - (fall - held) * slopes[-1]
    torch.testing.assert_close(total.item(), 0.5 * value)
    torch.testing.assert_close(log_prob.grad, 0.5 * torch.tensor(slopes, dtype=torch.float64))
