"""The value head, and the clipped regression of values by hand."""

import torch

from lit_dlm.rl.value import ValueHead, value_loss


def test_values_start_at_zero_and_are_linear_in_float32() -> None:
    head = ValueHead(3)
    rows = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 1.0]])
    assert head(rows).tolist() == [0.0, 0.0]
    with torch.no_grad():
        head.weight.copy_(torch.tensor([1.0, -1.0, 0.5]))
    assert head(rows).tolist() == [0.5, 0.5]
    assert head(rows.bfloat16()).dtype == torch.float32
    assert head(rows.double()).dtype == torch.float64
    head(rows).sum().backward()
    assert head.weight.grad.tolist() == [1.0, 2.0, 4.0]


def test_the_clipped_loss_by_hand() -> None:
    """Clip 0.2, old values 0, returns 1.

    V = 0.5 is clipped to 0.2: max(0.25, 0.64) = 0.64. V = 0.1: 0.81 both ways. V = -1 is clipped to
    -0.2: max(4, 1.44) = 4. Weights 1, 2, 1: half of 0.64 + 1.62 + 4. The last has no weight.
    """
    values = torch.tensor([0.5, 0.1, -1.0, 7.0], requires_grad=True)
    weight = torch.tensor([1.0, 2.0, 1.0, 0.0])
    terms = value_loss(values, torch.zeros(4), torch.ones(4), weight, clip=0.2)
    torch.testing.assert_close(terms.total, torch.tensor(3.13))
    terms.total.backward()
    # The first has moved far enough; V - R times the weight for the others.
    torch.testing.assert_close(values.grad, torch.tensor([0.0, -1.8, -2.0, 0.0]))
    old, returns = torch.full((2,), 5.0), torch.tensor([1.0, -1.0])
    moved = value_loss(returns, old, returns, torch.ones(2))  # the same clip
    torch.testing.assert_close(moved.total, torch.tensor(0.5 * (3.8**2 + 5.8**2)))
