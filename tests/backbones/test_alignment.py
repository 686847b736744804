"""The right shift, on tensors small enough to read."""

import pytest
import torch

from lit_dlm.backbones.visibility import aligned, first_column, raw_columns
from lit_dlm.tensors.batches import gather_rows


def test_with_shift_row_i_is_the_raw_row_before_it_but_that_of_the_first_real_token():
    """Raw rows 10, 11, 12, 13: tokens 1, 2, 3 are predicted by 10, 11, 12; token 0 keeps 10.

    Behind two pads (raw 10, 11) token 2 must not receive the pad's 11; token 3 receives 12.
    """
    rows = torch.tensor([[10.0, 11.0, 12.0, 13.0]])
    assert torch.equal(aligned(rows, 0), rows)
    assert aligned(rows, 1).tolist() == [[10.0, 10.0, 11.0, 12.0]]
    starts = first_column(torch.tensor([[False, False, True, True]]))
    assert aligned(rows, 1, starts=starts)[0, 2:].tolist() == [12.0, 12.0]


def test_first_real_column_of_right_padding_and_of_an_empty_row_is_zero():
    pad_mask = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 1]])
    assert first_column(pad_mask).tolist() == [0, 0, 1]


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("starts", [None, torch.tensor([0, 2, 4])])
def test_gathering_equals_reading_the_aligned_rows(shift: int, starts: torch.Tensor | None):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 7, 4, generator=generator)
    columns = torch.randint(0, 7, (3, 5), generator=generator)
    whole = aligned(rows, shift, starts=starts)
    expected = torch.stack([whole[b, columns[b]] for b in range(3)])
    assert torch.equal(gather_rows(rows, raw_columns(columns, shift, starts=starts)), expected)
