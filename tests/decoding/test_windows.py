import pytest
import torch

from lit_dlm.decoding import BlockWindow, FullWindow, SlidingWindow
from tests.decoding.states import state_with_masks

# Two prompt columns, then six response columns; 1 = masked.
MASKS = [[1, 1, 1, 1, 1, 1], [0, 0, 1, 0, 1, 1], [0, 0, 0, 0, 0, 1]]


def _columns(candidates: torch.Tensor) -> list[list[int]]:
    return [row.nonzero()[:, 0].tolist() for row in candidates]


def test_full_window_offers_every_mask_and_looks_at_the_response_only():
    view = FullWindow().view(state_with_masks(MASKS))
    assert _columns(view.candidates) == [[2, 3, 4, 5, 6, 7], [4, 6, 7], [7]]
    assert view.columns.tolist() == [[2, 3, 4, 5, 6, 7]] * 3


def test_block_window_is_the_first_block_with_a_mask_in_each_row():
    """Blocks of 2 start at columns 2, 4 and 6."""
    view = BlockWindow(2).view(state_with_masks(MASKS))
    assert view.block.tolist() == [0, 1, 2]
    assert _columns(view.candidates) == [[2, 3], [4], [7]]
    assert view.columns.tolist() == [[2, 3], [4, 5], [6, 7]]
    assert view.num_blocks == 3


def test_last_block_may_be_shorter():
    """Blocks of 4: the second one has columns 6 and 7 only."""
    view = BlockWindow(4).view(state_with_masks(MASKS[2:]))
    assert _columns(view.candidates) == [[7]]
    assert view.columns.tolist() == [[6, 7, 7, 7]]
    assert view.num_blocks == 2


def test_sliding_window_starts_at_the_first_mask():
    view = SlidingWindow(3).view(state_with_masks(MASKS))
    assert _columns(view.candidates) == [[2, 3, 4], [4, 6], [7]]
    assert view.columns.tolist() == [[2, 3, 4], [4, 5, 6], [7, 7, 7]]


@pytest.mark.parametrize(
    "window", [BlockWindow(2), BlockWindow(99), SlidingWindow(3), FullWindow()]
)
def test_columns_cover_the_candidates(window):
    view = window.view(state_with_masks(MASKS))
    for columns, row in zip(view.columns.tolist(), _columns(view.candidates), strict=True):
        assert set(row) <= set(columns)


@pytest.mark.parametrize(
    ("make", "name"), [(BlockWindow, "block_length"), (SlidingWindow, "width")]
)
def test_sizes_below_one_are_refused_by_name(make, name):
    with pytest.raises(ValueError, match=f"{name}: expected at least 1, got 0"):
        make(0)
