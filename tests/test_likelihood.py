"""The Monte-Carlo bound of the log-likelihood, against all masks of short targets."""

from itertools import combinations, pairwise

import pytest
import torch

from lit_dlm.backbones import HFBackbone, load_backbone
from lit_dlm.likelihood import log_likelihood_bound, masked_draws
from tests.backbones.conftest import tiny_architecture

PROMPT, TARGET = [3, 9, 14, 4], [20, 31, 7, 45, 12]


@pytest.fixture(scope="module")
def tiny() -> HFBackbone:
    return load_backbone("tiny")


def exact_bound(backbone: HFBackbone, prompt: list[int], target: list[int]) -> float:
    """Mean over k of the mean over all sets of k cells of n / k * sum of log-probabilities."""
    n, ids = len(target), torch.tensor([prompt + target])
    total = 0.0
    for k in range(1, n + 1):
        sets = list(combinations(range(n), k))
        for hidden in sets:
            columns = [len(prompt) + cell for cell in hidden]
            canvas = ids.clone()
            canvas[0, columns] = backbone.spec.mask_id
            logits = backbone.denoise(canvas, response_start=len(prompt)).logits[0, columns]
            log_prob = logits.log_softmax(-1)[torch.arange(k), ids[0, columns]]
            total += float(log_prob.double().sum()) * n / k / len(sets) / n
    return total


@pytest.mark.parametrize("antithetic", [True, False])
def test_many_draws_come_to_the_mean_over_all_masks(tiny: HFBackbone, antithetic: bool):
    """Within four standard errors, which the spread of 16 estimates of 256 draws gives."""
    exact = exact_bound(tiny, PROMPT, TARGET)
    draws = {"num_draws": 256, "batch_size": 256, "antithetic": antithetic}
    bounds = [log_likelihood_bound(tiny, PROMPT, TARGET, seed=s, **draws) for s in range(16)]
    estimates = torch.tensor(bounds)
    error = float(estimates.std()) / 4.0
    assert 0.0 < error < 0.02 * abs(exact)
    assert abs(float(estimates.mean()) - exact) < 4.0 * error


def test_one_token_needs_no_chance(tiny: HFBackbone):
    """One cell has one mask, so the bound is the log-probability itself."""
    found = log_likelihood_bound(tiny, PROMPT, [20], num_draws=2)
    assert found == pytest.approx(exact_bound(tiny, PROMPT, [20]), rel=1e-6)


def test_a_block_model_sums_its_blocks():
    """Blocks of 2 counted from the row: a prompt of 3 shares the second one with a target of 4.

    Each block has at most 2 cells, so 3 masks; many draws come to the sum of the exact bounds of
    the targets [3], [4, 5] and [6] behind all before them.
    """
    torch.manual_seed(0)
    architecture = tiny_architecture(attention="block", block_size=2, decoder="qwen3")
    backbone = HFBackbone(architecture=architecture).eval()
    ids = [5, 6, 7, 8, 9, 10, 11]
    exact = sum(exact_bound(backbone, ids[:a], ids[a:b]) for a, b in pairwise([3, 4, 6, 7]))
    found = log_likelihood_bound(backbone, ids[:3], ids[3:], num_draws=4096, batch_size=4096)
    assert found == pytest.approx(exact, rel=5e-3)


def test_estimates_do_not_depend_on_the_batch_and_repeat(tiny: HFBackbone):
    one, other, again = (
        log_likelihood_bound(tiny, PROMPT, TARGET, num_draws=32, batch_size=size, seed=3)
        for size in (32, 5, 32)
    )
    assert one == again
    assert other == pytest.approx(one, rel=1e-6)
    assert one != log_likelihood_bound(tiny, PROMPT, TARGET, num_draws=32, seed=4)


def test_counts_are_even_and_pairs_share_an_order():
    """16 draws of 4 cells: every count four times; a pair overlaps in one cell and leaves none."""
    plain = masked_draws(4, num_draws=16, antithetic=False, seed=0)
    assert plain.sum(1).bincount().tolist() == [0, 4, 4, 4, 4]
    pairs = masked_draws(4, num_draws=16, antithetic=True, seed=0)
    first, second = pairs[:8], pairs[8:]
    assert (first.sum(1) + second.sum(1)).tolist() == [5] * 8
    assert (first | second).all()
    assert (first & second).sum(1).tolist() == [1] * 8


def test_what_cannot_be_scored_is_refused(tiny: HFBackbone):
    with pytest.raises(ValueError, match="got 0 and 1 tokens"):
        log_likelihood_bound(tiny, [], [5])
    with pytest.raises(ValueError, match="num_draws 3"):
        log_likelihood_bound(tiny, PROMPT, [5], num_draws=3)
