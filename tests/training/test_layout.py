"""Rows of a clean and noisy copies: by hand, by their rule, and equal to decoding."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lit_dlm.backbones.visibility import block_causal_visibility
from lit_dlm.training.layout import Slots
from tests.backbones.slow_masks import PADDING, slow
from tests.shared_data import shared


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize(("start", "size"), [(4, 3), (5, 4), (7, 4), (6, 5), (0, 4), (4, 1)])
def test_the_trace_layout_follows_its_rule(padding: str, start: int, size: int):
    """Clean cells see clean ones of their own block and earlier ones, noisy cells see clean ones
    of earlier blocks and noisy ones of their own."""
    real = torch.tensor(PADDING[padding]).bool()
    source = [*range(11), *range(start, 11)]
    block = [(column - start) // size for column in source]

    def rule(row: int, query: int, key: int) -> bool:
        if not real[row, source[key]] or (key >= 11 and query < 11):
            return False
        is_own = block[query] == block[key] and (query >= 11) == (key >= 11)
        return is_own or (key < 11 and block[query] > block[key])

    layout = Slots.trace(start, 11, size, pad_mask=real)
    assert layout.source.tolist() == source
    assert layout.is_noisy.tolist() == [False] * 11 + [True] * (11 - start)
    assert torch.equal(layout.visibility(), slow(rule, 2, 22 - start))
    positions = torch.arange(11).expand(2, -1)
    assert torch.equal(layout.positions(positions), positions[:, source])


@pytest.mark.parametrize(
    ("start", "response", "size"), [(8, 16, 4), (7, 14, 4), (10, 12, 5), (6, 10, 4)]
)
def test_the_trace_layout_equals_the_reference_masks(start: int, response: int, size: int):
    cases = load_file(shared("parity", "sdar", "cases.safetensors"))
    expected = cases[f"masks.{start}_{response}_{size}"].bool()
    assert torch.equal(Slots.trace(start, start + response, size).visibility(), expected)


def linear_attention(ids: Tensor, visible: Tensor, positions: Tensor) -> Tensor:
    """Two layers of attention with fixed random weights in float64: enough to leak if it could."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(20, 8, generator=generator, dtype=torch.float64)
    place = torch.randn(40, 8, generator=generator, dtype=torch.float64)
    x = table[ids] + place[positions]
    for _ in range(2):
        w = torch.randn(3, 8, 8, generator=generator, dtype=torch.float64) / 3
        scores = ((x @ w[0]) @ (x @ w[1]).transpose(1, 2)).masked_fill(~visible[:, 0], -torch.inf)
        x = x + torch.tanh(scores.softmax(-1) @ x @ w[2])
    return x


@pytest.mark.parametrize("origin", ["sequence", "response"])
@pytest.mark.parametrize("prompts", [(5, 5), (3, 5), (8, 6)])
def test_a_noisy_block_sees_what_it_sees_while_it_is_decoded(origin: Any, prompts: tuple[int, int]):
    """Each block's noisy slots equal a direct forward with that block noisy and the rest absent.

    Left-padded prompts of different lengths, 7 response cells, blocks of 4: with the sequence as
    origin the tail of a prompt shares a block with the response, in each row another part.
    """
    start, size = max(prompts), 4
    length = start + 7
    real = torch.arange(length) >= (start - torch.tensor(prompts))[:, None]
    generator = torch.Generator().manual_seed(1)
    clean = torch.randint(1, 20, (2, length), generator=generator)
    hide = torch.rand(2, length, generator=generator) < 0.5
    noisy = clean.masked_fill(hide & (torch.arange(length) >= start), 0)
    positions = (real.long().cumsum(1) - 1).clamp_min(0)
    layout = Slots.trace(start, length, size, pad_mask=real, origin=origin)
    row_ids = torch.where(layout.is_noisy, noisy[:, layout.source], clean[:, layout.source])
    trained = linear_attention(row_ids, layout.visibility(), layout.positions(positions))
    compared = 0
    for row, prompt in enumerate(prompts):
        first = start - prompt
        begin = first if origin == "sequence" else start
        for number in range(-3, 5):
            block = [c for c in range(first, length) if (c - begin) // size == number]
            if not block or block[-1] < start:
                continue
            canvas = torch.cat([clean[row, first : block[0]], noisy[row, block[0] : block[-1] + 1]])
            blocks = (torch.arange(first, block[-1] + 1) - begin).div(size, rounding_mode="floor")
            direct = linear_attention(
                canvas[None],
                block_causal_visibility(blocks[None]),
                torch.arange(len(canvas))[None],
            )
            for column in block:
                slots = ((layout.source == column) & layout.is_noisy).nonzero()[:, 0].tolist()
                assert len(slots) == 1 or column < start
                for slot in slots:
                    torch.testing.assert_close(trained[row, slot], direct[0, column - first])
                    compared += 1
    assert compared >= 14


def test_visibility_by_hand() -> None:
    """One prompt cell, two response blocks of one cell, two copies: P a b | a1 b1 | a2 b2."""
    layout = Slots.trace(1, 3, 1).packed(2)
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
    layout = Slots.trace(2, 6, 2)
    assert layout.predictors().tolist() == [[0, 0, 1, 2, 3, 4, 1, 6, 3, 8]]
    copies = Slots.trace(1, 3, 1).packed(2)
    assert copies.predictors().tolist() == [[0, 0, 1, 0, 1, 0, 1]]


@pytest.mark.parametrize("origin", ["sequence", "response"])
def test_each_copy_sees_what_a_row_of_its_own_does(origin: Any) -> None:
    real = torch.ones(2, 11, dtype=torch.bool)
    real[1, :2] = False
    two = Slots.trace(4, 11, 3, pad_mask=real, origin=origin)
    layout = two.packed(3)
    visible, alone = layout.visibility(), two.visibility()
    size = int((~two.is_noisy).sum())
    for copy in range(3):
        slots = torch.cat([torch.arange(size), (layout.copy == copy).nonzero()[:, 0]])
        assert visible[:, :, slots][..., slots].equal(alone)
        others = (layout.copy >= 0) & (layout.copy != copy)
        noisy = (layout.copy == copy).nonzero()[:, 0]
        assert not visible[:, :, noisy][..., others].any()
