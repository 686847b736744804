from dataclasses import replace

import pytest
import torch

import lit_dlm.decoding as d
from lit_dlm.decoding import BlockWindow, Decoder, FullWindow, SlidingWindow
from lit_dlm.decoding.windows import SteppedBlockWindow, check_window, default_window, masks_first
from tests.decoding.models import table_backbone
from tests.decoding.states import decoded, state_with_masks
from tests.fakes import MASK, PAD, TableBackbone, fake_spec

IN_BLOCKS = fake_spec(attention="block", block_size=4, block_origin="sequence")
# Two prompt columns, then six response columns; 1 = masked.
MASKS = [[1, 1, 1, 1, 1, 1], [0, 0, 1, 0, 1, 1], [0, 0, 0, 0, 0, 1]]


def cells(candidates: torch.Tensor) -> list[list[int]]:
    return [row.nonzero()[:, 0].tolist() for row in candidates]


@pytest.mark.parametrize(
    ("window", "candidates", "columns", "block", "num_blocks"),
    [
        (FullWindow(), [[2, 3, 4, 5, 6, 7], [4, 6, 7], [7]], [[*range(2, 8)]] * 3, [0, 0, 0], 1),
        # Each row is in its first block with a mask; blocks of 2 start at columns 2, 4 and 6.
        (BlockWindow(2), [[2, 3], [4], [7]], [[2, 3], [4, 5], [6, 7]], [0, 1, 2], 3),
        (BlockWindow(99), [[2, 3, 4, 5, 6, 7], [4, 6, 7], [7]], [[*range(2, 8)]] * 3, [0] * 3, 1),
        # From the first mask on.
        (SlidingWindow(3), [[2, 3, 4], [4, 6], [7]], [[2, 3, 4], [4, 5, 6], [7] * 3], [0] * 3, 1),
    ],
)
def test_where_a_step_may_commit_and_looks(window, candidates, columns, block, num_blocks):
    view = window.view(state_with_masks(MASKS))
    assert cells(view.candidates) == candidates
    assert view.columns.tolist() == columns
    assert view.block.tolist() == block
    assert view.num_blocks == num_blocks


@pytest.mark.parametrize("length", [2, 4, 99])
@pytest.mark.parametrize("origin", ["sequence", "response"])
def test_a_row_without_masks_looks_at_columns_that_exist(length, origin):
    state = state_with_masks([[0] * 6, [0, 0, 1, 0, 1, 1]])
    for window in (BlockWindow(length, origin=origin), SlidingWindow(length), FullWindow()):
        view = window.view(state)
        assert not view.candidates[0].any()
        assert 0 <= view.columns.min() <= view.columns.max() <= 7


def test_masked_columns_come_first_and_at_least_one_is_kept():
    """Columns 2..5; row 0 is masked at 3 and 5, row 1 at 4: two are kept, row 1 adds column 2."""
    state = state_with_masks([[0, 1, 0, 1], [0, 0, 1, 0]])
    columns = torch.arange(2, 6).expand(2, -1)
    assert columns.gather(1, masks_first(state, columns)).tolist() == [[3, 5], [4, 2]]
    assert masks_first(state_with_masks([[0, 0]]), torch.tensor([[2, 3]])).tolist() == [[0]]


def test_blocks_from_the_sequence_begin_in_the_prompt():
    """A row of 5 tokens behind 2 of padding, blocks of 4: columns 2..5, 6..9, 10..12.

    The response begins at column 7, so its first block is 6..9 with candidates 7, 8, 9.
    """
    window = BlockWindow(4, origin="sequence")
    ids = torch.tensor([[PAD] * 2 + [4] * 5 + [MASK] * 6])
    masked = ids == MASK
    positions = (torch.arange(13) - 2).clamp_min(0)[None]
    fields = {"ids": ids, "masked": masked, "kept_open": masked & False, "positions": positions}
    state = replace(state_with_masks([[1]]), **fields, start=7)
    view = window.view(state)
    assert cells(view.candidates) == [[7, 8, 9]]
    assert view.columns.tolist() == [[6, 7, 8, 9]]
    assert view.block.tolist() == [0]
    assert window.bounds(7, start=7, length=13, first=2) == (6, 10)
    later = window.view(replace(state, masked=masked & (torch.arange(13) >= 11)))
    assert cells(later.candidates) == [[11, 12]]
    assert later.block.tolist() == [1]
    assert window.bounds(11, start=7, length=13, first=2) == (10, 13)
    assert BlockWindow(4).bounds(11, start=7, length=13, first=2) == (11, 13)


@pytest.mark.parametrize("origin", ["sequence", "response"])
def test_a_model_with_blocks_brings_its_own_window(origin):
    spec = replace(IN_BLOCKS, block_origin=origin)
    window = default_window(spec)
    assert isinstance(window, BlockWindow)
    assert (window.block_length, window.origin) == (4, origin)
    check_window(window, spec)
    check_window(BlockWindow(2, origin=origin), spec)  # half a block after the other
    assert isinstance(default_window(fake_spec()), FullWindow)
    check_window(SlidingWindow(3), fake_spec())


@pytest.mark.parametrize(
    "window",
    [
        FullWindow(),
        SlidingWindow(4),
        SteppedBlockWindow(4, steps=8),
        BlockWindow(8, origin="sequence"),
        BlockWindow(3, origin="sequence"),
        BlockWindow(4),
    ],
)
def test_a_window_that_a_block_model_cannot_have_is_refused(window):
    with pytest.raises(ValueError, match=rf"window: .* block after block.*{type(window).__name__}"):
        check_window(window, IN_BLOCKS)


def test_a_decoder_on_a_model_names_its_window():
    plain = Decoder(policy=d.ConfidencePolicy())
    described = plain.on(IN_BLOCKS).describe()["window"]
    assert described == {"name": "BlockWindow", "block_length": 4, "origin": "sequence"}
    assert plain.on(fake_spec()).describe() == plain.describe()
    assert plain.describe()["window"] == {"name": "FullWindow"}
    given = Decoder(policy=d.ConfidencePolicy(), window=SlidingWindow(3))
    assert given.on(fake_spec()) is given


# -- the release's step accounting of its baselines, and ours of the same methods ----------------


def fast(window: d.Window, table: torch.Tensor) -> d.DecodeResult:
    """Fast-dLLM behind a prompt of one token."""
    decoder = Decoder(policy=d.ThresholdPolicy(0.6), quota=d.NoQuota(), window=window)
    return decoded(decoder, TableBackbone(table), [[3]], len(table) - 1)


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        # Block 0 in step 0, idle to step 127, block 1 in step 128.
        (SteppedBlockWindow(128, steps=256), (129, 127)),
        # The last of 8 blocks begins at step 224; 8 steps write.
        (SteppedBlockWindow(32, steps=256), (225, 217)),
        (BlockWindow(128), (2, 0)),
        (BlockWindow(32), (8, 0)),
    ],
)
def test_blocks_of_the_release_idle_and_ours_advance_when_they_are_full(window, expected):
    result = fast(window, table_backbone([5] * 256, [1.0] * 256, prompt=1).table)
    assert result.status == ["complete"]
    assert (int(result.num_steps[0]), int(result.idle_steps[0])) == expected


def test_text_is_the_same_whatever_idles():
    table = torch.randn(17, 8, generator=torch.Generator().manual_seed(0)) * 3
    stepped, moving = fast(SteppedBlockWindow(8, steps=16), table), fast(BlockWindow(8), table)
    assert torch.equal(stepped.ids, moving.ids)
    assert stepped.num_steps > moving.num_steps


def test_steps_of_the_release_may_be_more_than_masks():
    result = fast(SteppedBlockWindow(8, steps=32), torch.zeros(17, 8))
    assert result.status == ["complete"]
    assert int(result.num_steps[0]) == 24  # eight of the second block, which begins at step 16


class Masked(d.BlockWindow):
    def view(self, state):
        return state.masked


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BlockWindow(0), "block_length"),
        (lambda: SlidingWindow(0), "width"),
        (lambda: SteppedBlockWindow(0), "block_length"),
        (lambda: fast(SteppedBlockWindow(24), torch.zeros(65, 8)), "multiple of 24 tokens"),
        (
            lambda: SteppedBlockWindow().bounds(3, start=1, length=9, first=0),
            "expected BlockWindow, FullWindow or one that has a method bounds",
        ),
        (lambda: fast(Masked(), torch.zeros(9, 8)), "window.view: expected WindowView, got Tensor"),
    ],
)
def test_what_gives_no_windows_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
