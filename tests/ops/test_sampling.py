import pytest
import torch

from lit_dlm.ops.sampling import (
    RUN,
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


def test_top_p_keeps_the_token_that_crosses_the_bound():
    """Sorted probabilities 0.5, 0.3, 0.2. Mass before each: 0, 0.5, 0.8; kept while below p."""
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log()
    for top_p, kept in (
        (0.4, [False, True, False]),
        (0.6, [False, True, True]),
        (0.9, [True, True, True]),
    ):
        assert keep_top_p(logits, top_p).isfinite().tolist() == [kept]


def test_top_p_keeps_one_token_even_for_a_tiny_bound():
    logits = torch.randn(5, 20, generator=torch.Generator().manual_seed(0))
    kept = keep_top_p(logits, 1e-6).isfinite()
    assert torch.equal(kept.sum(-1), torch.ones(5, dtype=torch.long))
    assert torch.equal(kept.to(torch.uint8).argmax(-1), logits.argmax(-1))


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
    expected = logits if top_k is None else keep_top_k(logits, top_k)
    expected = expected if top_p is None else keep_top_p(expected, top_p)
    assert torch.equal(dense, expected)


def test_a_sharp_distribution_leaves_few_logits_to_look_at():
    logits = torch.arange(20_000.0).neg()[None]
    assert survivors(logits, top_k=None, top_p=0.95)[0].shape[1] < 2000


@pytest.mark.parametrize("size", [2 * RUN, 2 * RUN + 300])
def test_draws_by_runs_follow_the_softmax(size):
    """Shares of seven ids in 40,000 draws, of every run and one of them forbidden."""
    logits = torch.full((size,), -torch.inf)
    ids = torch.tensor([0, 5, RUN - 1, RUN, RUN + 9, size - 2, size - 1])
    logits[ids] = torch.tensor([3.0, 0.0, 1.5, 2.0, 2.5, -torch.inf, 1.0])
    cells = torch.arange(40_000)
    zeros = torch.zeros_like(cells)
    noise = cell_gumbel_noise(zeros + 3, zeros, cells, RUN + 3)[:, : RUN + -(-size // RUN)]
    drawn = torch.cat(
        [draw_by_runs(logits.expand(len(part), -1), part) for part in noise.split(500)]
    )
    shares = torch.bincount(drawn, minlength=size) / len(cells)
    # Standard error at most 0.0025.
    torch.testing.assert_close(shares, logits.softmax(0), atol=0.008, rtol=0.0)
