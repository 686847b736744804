import torch

from lit_dlm.ops.sampling import keep_top_k, keep_top_p


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
