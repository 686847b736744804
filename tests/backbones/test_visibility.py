"""Block-causal attention by its rule; positions out of order by hand."""

import pytest
import torch

from lit_dlm.backbones.visibility import block_causal_visibility, block_numbers, canvas_blocks
from tests.backbones.slow_masks import PADDING, slow
from tests.fakes import fake_spec


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("block_size", [1, 3, 4, 20])
@pytest.mark.parametrize("origin", [None, 0, 4, 11])
def test_block_causal_is_own_and_earlier_blocks(padding: str, block_size: int, origin: int | None):
    """11 columns: ragged for blocks of 3 and 4, one single block for 20."""
    real = torch.tensor(PADDING[padding]).bool()
    firsts = [row.index(1) for row in PADDING[padding]]

    def block(row: int, column: int) -> int:
        return (column - (firsts[row] if origin is None else origin)) // block_size

    expected = slow(lambda row, q, k: bool(real[row, k]) and block(row, q) >= block(row, k), 2, 11)
    blocks = block_numbers(real, block_size, origin=origin)
    assert torch.equal(block_causal_visibility(blocks, real).expand(2, -1, -1, -1), expected)
    if padding == "none":
        without = block_causal_visibility(block_numbers(real[:1], block_size, origin=origin))
        assert without.shape[0] == 1  # one mask for all rows
        assert torch.equal(without.expand(2, -1, -1, -1), expected)


def test_a_whole_prompt_is_one_block():
    """A prompt of 5, then blocks of 2, of which the last is cut short."""
    blocks = {"attention": "block", "block_size": 2}
    spec = fake_spec(**blocks, block_origin="response", whole_prompt=True)
    ids = torch.zeros(1, 10, dtype=torch.long)
    assert canvas_blocks(spec, ids, None, 5).tolist() == [[-1] * 5 + [0, 0, 1, 1, 2]]
    for fields in ({}, {**blocks, "block_origin": "sequence"}):
        with pytest.raises(ValueError, match="whole_prompt: expected block attention with"):
            fake_spec(**fields, whole_prompt=True)
