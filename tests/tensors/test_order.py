"""Positions out of order, by hand."""

import torch

from lit_dlm.tensors.order import non_ltr_positions


def test_non_ltr_positions_were_written_before_something_to_their_left() -> None:
    """Position 2 (step 1) follows position 1 (step 4); position 3 was never written."""
    found = non_ltr_positions(torch.tensor([0, 4, 1, -1, 3, 5]))
    assert found.int().tolist() == [0, 0, 1, 0, 1, 0]
