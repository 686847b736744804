"""The value head."""

import torch

from lit_dlm.rl.value import ValueHead


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
