import math

import pytest
import torch

from lit_dlm.tensors.sampling import (
    arg_max,
    confidence,
    entropy,
    margin,
    rank_descending,
    top_quota,
)


def test_scores_have_hand_computed_values():
    """Row 0: p = 1/2, 1/4, 1/4: H = 1/2 ln 2 + 1/2 ln 4 = 1.5 ln 2. Row 1 is certain: H = 0."""
    logits = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]).log()
    torch.testing.assert_close(entropy(logits), torch.tensor([1.5 * math.log(2.0), 0.0]))
    torch.testing.assert_close(margin(logits), torch.tensor([0.25, 1.0]))
    ids = torch.tensor([1, 0])
    torch.testing.assert_close(confidence(logits, ids), torch.tensor([0.25, 1.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_confidence_of_a_large_vocabulary_is_the_share_of_the_exponentials(dtype: torch.dtype):
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(2), dtype=dtype)
    logits[:, 7] = -torch.inf
    ids = torch.tensor([0, 4999, 7])
    shares = logits.double().exp() / logits.double().exp().sum(1, keepdim=True)
    expected = shares[torch.arange(3), ids].to(dtype)
    torch.testing.assert_close(confidence(logits, ids), expected)


@pytest.mark.parametrize("seed", range(5))
def test_ranks_and_quotas_are_those_of_a_sort_in_python(seed: int):
    """Among many ties and candidates of -inf; the first row has no candidate."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 4, (5, 12), generator=generator).float().log()
    share = torch.tensor([0.0, 0.3, 0.6, 0.9, 1.0])[:, None]
    candidates = torch.rand(5, 12, generator=generator) < share
    quotas = [1, 0, 2, 3, 15]
    ranks, best = rank_descending(scores, candidates), top_quota(scores, candidates, 1)
    chosen = top_quota(scores, candidates, torch.tensor(quotas))
    for row, quota in enumerate(quotas):
        columns = candidates[row].nonzero()[:, 0].tolist()
        order = sorted(columns, key=lambda c: (-scores[row, c].item(), c))
        assert ranks[row, order].tolist() == list(range(len(order)))
        rest = ranks[row, ~candidates[row]].tolist()
        assert sorted(rest) == list(range(len(order), 12))
        assert best[row].nonzero()[:, 0].tolist() == order[:1]
        assert chosen[row].nonzero()[:, 0].tolist() == sorted(order[:quota])


@pytest.mark.parametrize("vocab_size", [3, 256, 257, 700, 1024, 131_073])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_arg_max_equals_that_of_torch(vocab_size: int, dtype: torch.dtype):
    """Values rounded to halves give many ties, forbidden ids are minus infinity."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(2, 3, vocab_size, generator=generator) * 4).round() / 2
    logits = logits.to(dtype)
    logits[..., 1] = -torch.inf
    assert torch.equal(arg_max(logits), logits.argmax(-1))


def test_arg_max_of_ties_is_the_lowest_id_in_every_part_of_the_vocabulary():
    logits = torch.zeros(3, 600)
    for row, ids in enumerate(([300, 590], [520, 599], [599])):
        logits[row, ids] = 1.0
    assert arg_max(logits).tolist() == [300, 520, 599]
