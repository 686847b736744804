import pytest
import torch

from lit_dlm.tensors import sampling
from lit_dlm.tensors.sampling import (
    cell_gumbel_noise,
    draw_by_runs,
    keep_top_k,
    keep_top_p,
    survivors,
)


def test_top_k_keeps_the_k_largest():
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    assert keep_top_k(logits, 2).isfinite().tolist() == [[False, True, True, False]]
    assert torch.equal(keep_top_k(logits, 9), logits)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1e-6, [0, 1, 0]), (0.4, [0, 1, 0]), (0.6, [0, 1, 1]), (0.9, [1, 1, 1])],
)
def test_top_p_keeps_the_token_that_crosses_the_bound(top_p: float, kept: list[int]):
    """Sorted probabilities 0.5, 0.3, 0.2. Mass before each: 0, 0.5, 0.8; kept while below p."""
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log()
    assert keep_top_p(logits, top_p).isfinite().int().tolist() == [kept]


@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [(None, 0.95), (None, 0.3), (50, None), (50, 0.9), (2000, None), (None, None), (None, 1.0)],
)
@pytest.mark.parametrize("scale", [0.0, 0.5, 4.0, 12.0])
@pytest.mark.parametrize("vocab_size", [300, 20_000])
def test_survivors_are_those_of_a_full_sort(vocab_size, scale, top_k, top_p):
    """Logits rounded to bfloat16 have many ties, at scale 0 nothing else; some are forbidden."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(5, vocab_size, generator=generator) * scale).bfloat16().float()
    logits[:, ::7] = -torch.inf
    logits[4, 200:] = -torch.inf  # fewer than are looked at first
    values, ids = survivors(logits, top_k=top_k, top_p=top_p)
    dense = values
    if ids is not None:
        assert (ids.diff() > 0).all()
        dense = torch.full_like(logits, -torch.inf).scatter(1, ids, values)
    expected = logits if top_p is None else keep_top_p(logits, top_p)
    expected = expected if top_k is None else keep_top_k(expected, top_k)
    assert torch.equal(dense, expected)


def test_a_sharp_distribution_leaves_few_logits_to_look_at():
    logits = torch.arange(20_000.0).neg()[None]
    assert survivors(logits, top_k=None, top_p=0.95)[0].shape[1] < 2000


@pytest.mark.parametrize("size", [64, 73])
def test_draws_by_runs_follow_the_softmax(size: int, monkeypatch: pytest.MonkeyPatch):
    """Shares of seven ids in 40,000 draws, of every run of 32 and one of them forbidden."""
    monkeypatch.setattr(sampling, "RUN", 32)
    logits = torch.full((size,), -torch.inf)
    ids = torch.tensor([0, 5, 31, 32, 41, size - 2, size - 1])
    logits[ids] = torch.tensor([3.0, 0.0, 1.5, 2.0, 2.5, -torch.inf, 1.0])
    cells = torch.arange(40_000)
    zeros = torch.zeros_like(cells)
    noise = cell_gumbel_noise(zeros + 3, zeros, cells, 32 + -(-size // 32))
    drawn = draw_by_runs(logits.expand(len(cells), -1), noise)
    shares = torch.bincount(drawn, minlength=size) / len(cells)
    # Standard error at most 0.0025.
    torch.testing.assert_close(shares, logits.softmax(0), atol=0.008, rtol=0.0)


def test_the_nucleus_is_that_of_the_whole_distribution():
    """Before the third token there are 0.895; of the three most probable ones alone, 0.942."""
    logits = torch.tensor([[0.6, 0.295, 0.055, 0.05]]).log()
    kept, _ = survivors(logits, top_k=3, top_p=0.9)
    assert kept.isfinite().tolist() == [[True, True, True, False]]
