"""The value head."""

from __future__ import annotations

import torch

from lit_dlm.heads.value import ValueHead


def test_starts_at_zero_and_is_linear_in_float32() -> None:
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
