"""Packed rows: who sees whom, by hand and against rows of two copies."""

from __future__ import annotations

import pytest
import torch

from lit_dlm.ops.masking import TwoCopyLayout


def test_visibility_by_hand() -> None:
    """One prompt cell, two response blocks of one cell, two copies: P a b | a1 b1 | a2 b2."""
    layout = TwoCopyLayout.trace(1, 3, 1).packed(2)
    assert layout.source.tolist() == [0, 1, 2, 1, 2, 1, 2]
    assert layout.copy.tolist() == [-1, -1, -1, 0, 0, 1, 1]
    assert layout.visibility()[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 0, 0, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],
        [1, 0, 0, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 0, 1],
    ]
    assert layout.positions(torch.tensor([[5, 6, 7]])).tolist() == [[5, 6, 7, 6, 7, 6, 7]]
    # A row that uses one copy: nobody sees the second, whose slots see earlier clean cells only.
    short = layout.visibility(torch.tensor([1]))[0, 0]
    assert not short[:5, 5:].any()
    assert short[5:].int().tolist() == [[1, 0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0]]


def test_the_first_cell_of_a_block_is_predicted_from_the_clean_copy() -> None:
    """Columns 0 to 5, two of a prompt, and the noisy 2 to 5 in slots 6 to 9."""
    layout = TwoCopyLayout.trace(2, 6, 2)
    assert layout.predictors().tolist() == [[0, 0, 1, 2, 3, 4, 1, 6, 3, 8]]
    copies = TwoCopyLayout.trace(1, 3, 1).packed(2)
    assert copies.predictors().tolist() == [[0, 0, 1, 0, 1, 0, 1]]


@pytest.mark.parametrize("origin", ["sequence", "response"])
def test_each_copy_sees_what_a_row_of_its_own_does(origin: str) -> None:
    real = torch.ones(2, 11, dtype=torch.bool)
    real[1, :2] = False
    two = TwoCopyLayout.trace(4, 11, 3, pad_mask=real, origin=origin)  # type: ignore[arg-type]
    layout = two.packed(3)
    visible, alone = layout.visibility(), two.visibility()
    size = int((~two.is_noisy).sum())
    for copy in range(3):
        slots = torch.cat([torch.arange(size), (layout.copy == copy).nonzero()[:, 0]])
        assert visible[:, :, slots][..., slots].equal(alone)
        others = (layout.copy >= 0) & (layout.copy != copy)
        noisy = (layout.copy == copy).nonzero()[:, 0]
        assert not visible[:, :, noisy][..., others].any()
