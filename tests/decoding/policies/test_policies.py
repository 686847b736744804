import pytest
import torch

import lit_dlm.decoding as d
from lit_dlm.decoding import DynamicPolicy, EntropyBoundedPolicy, Proposal, ThresholdPolicy
from tests.decoding.models import tiny_backbone
from tests.decoding.states import decoded, state_with_masks


def _proposal(prob: list[float]) -> Proposal:
    """Scores chosen so that each policy prefers another cell; entropies 2.0, 0.5, 1.0, 3.0."""
    values = torch.tensor([[0.0, 0.0, *prob]])
    return Proposal(
        ids=torch.full_like(values, 6, dtype=torch.long),
        prob=values,
        entropy=torch.tensor([[0.0, 0.0, 2.0, 0.5, 1.0, 3.0]]),
        margin=torch.tensor([[0.0, 0.0, 0.1, 0.2, 0.9, 0.3]]),
    )


def _commits(policy, prob, *, quota=1, masks=((1, 1, 1, 1),)) -> list[int]:
    state = state_with_masks(masks)
    counts = None if quota is None else torch.tensor([quota])
    selection = policy.select(state, state.masked, _proposal(prob), counts)
    return selection.commit[0].nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("policy", "prob", "quota", "cells"),
    [
        (d.ConfidencePolicy(), [0.95, 0.2, 0.3, 0.4], 1, [2]),
        (d.EntropyPolicy(), [0.95, 0.2, 0.3, 0.4], 1, [3]),
        (d.EntropyPolicy(), [0.95, 0.2, 0.3, 0.4], 2, [3, 4]),
        (d.MarginPolicy(), [0.95, 0.2, 0.3, 0.4], 1, [4]),
        (d.SequentialPolicy(), [0.1, 0.9, 0.2, 0.8], 2, [2, 3]),
        # All that reach the threshold and nothing else; with a quota, never slower than that.
        (ThresholdPolicy(0.9), [0.9, 0.95, 0.89, 0.1], None, [2, 3]),
        (ThresholdPolicy(0.9), [0.1, 0.2, 0.3, 0.4], None, []),
        (ThresholdPolicy(0.9), [0.1, 0.2, 0.3, 0.4], 2, [4, 5]),
        (ThresholdPolicy(0.9), [0.95, 0.2, 0.3, 0.4], 2, [2, 5]),
        # dLLM-RL's block sampler: 0.9 is not over 0.9; one over the threshold, so the best two.
        (DynamicPolicy(0.9), [0.9, 0.2, 0.3, 0.4], 1, [2]),
        (DynamicPolicy(0.9), [0.9, 0.95, 0.3, 0.4], 1, [3]),
        (DynamicPolicy(0.9), [0.95, 0.2, 0.3, 0.4], 2, [2, 5]),
        (DynamicPolicy(0.9), [0.95, 0.91, 0.92, 0.4], 2, [2, 3, 4]),
        # Sums of the smallest entropies, 0.5, 1.5, 3.5 and 6.5, stay under the bound: even the
        # smallest is over it (one all the same), or a sum equals it (which is not under it).
        (EntropyBoundedPolicy(0.35), [0.5] * 4, None, [3]),
        (EntropyBoundedPolicy(1.0), [0.5] * 4, None, [3]),
        (EntropyBoundedPolicy(1.5), [0.5] * 4, None, [3]),
        (EntropyBoundedPolicy(1.6), [0.5] * 4, None, [3, 4]),
        (EntropyBoundedPolicy(3.6), [0.5] * 4, None, [2, 3, 4]),
        (EntropyBoundedPolicy(1.0), [0.5] * 4, 3, [2, 3, 4]),
        # Without their largest ones the sums are 0, 0.5, 1.5 and 3.5; they may reach the bound.
        (d.EBSamplerPolicy(0.4), [0.5] * 4, None, [3]),
        (d.EBSamplerPolicy(0.5), [0.5] * 4, None, [3, 4]),
        (d.EBSamplerPolicy(3.5), [0.5] * 4, None, [2, 3, 4, 5]),
        (d.EBSamplerPolicy(0.4), [0.5] * 4, 2, [3, 4]),
        # 2 x 0.05, 3 x 0.1, 4 x 0.25 (which is not under 1) and 5 x 0.6.
        (d.FactorPolicy(1.0), [0.9, 0.75, 0.95, 0.4], None, [2, 4]),
        (d.FactorPolicy(1.5), [0.9, 0.75, 0.95, 0.4], None, [2, 3, 4]),
        (d.FactorPolicy(0.05), [0.9, 0.75, 0.95, 0.4], None, []),
        (d.FactorPolicy(0.2), [0.9, 0.75, 0.95, 0.4], 3, [2, 3, 4]),
    ],
)
def test_each_policy_commits_its_own_favourites(policy, prob, quota, cells):
    assert _commits(policy, prob, quota=quota) == cells


def test_only_masked_cells_count():
    """The cell with entropy 0.5 is filled: 1.0 is the smallest, 1.0 + 2.0 = 3.0 the next sum."""
    bounded, prob = EntropyBoundedPolicy(3.1), [0.5] * 4
    assert _commits(bounded, prob, quota=None, masks=((1, 0, 1, 1),)) == [2, 4]
    assert _commits(d.SequentialPolicy(), prob, quota=1, masks=((0, 0, 1, 1),)) == [4]
    with pytest.raises(ValueError, match="bound"):
        EntropyBoundedPolicy(0.0)


def slow_factor(prob: list[float], factor: float) -> int:
    """Candidates that Fast-dLLM commits, of descending probabilities: the largest ``n``."""
    return max((n for n, c in enumerate(prob, 1) if (n + 1) * (1 - c) < factor), default=0)


def slow_eb_sampler(entropy: list[float], gamma: float) -> int:
    """Candidates that EB-Sampler commits, of ascending entropies."""
    sizes = range(1, len(entropy) + 1)
    return max([1, *(n for n in sizes if sum(entropy[:n]) - max(entropy[:n]) <= gamma)])


@pytest.mark.parametrize("seed", range(3))
def test_factor_and_entropies_commit_as_many_as_the_papers_rules(seed: int):
    """64 rows whose scores are sixteenths, so that the sums are exact and many are equal."""
    generator = torch.Generator().manual_seed(seed)
    state = state_with_masks(torch.randint(0, 2, (64, 9), generator=generator).tolist())
    level = torch.randint(1, 17, state.ids.shape, generator=generator) / 16
    proposal = Proposal(ids=state.ids, prob=level, entropy=1.0 - level)
    for policy, slow in (
        (d.FactorPolicy(0.5), lambda best: slow_factor(best, 0.5)),
        (d.FactorPolicy(2.0), lambda best: slow_factor(best, 2.0)),
        (d.EBSamplerPolicy(0.25), lambda best: slow_eb_sampler([1 - c for c in best], 0.25)),
        (d.EBSamplerPolicy(1.0), lambda best: slow_eb_sampler([1 - c for c in best], 1.0)),
    ):
        commit = policy.select(state, state.masked, proposal, None).commit
        for row in range(64):
            cells = state.masked[row].nonzero()[:, 0].tolist()
            order = sorted(cells, key=lambda cell: -level[row, cell])
            number = slow([float(level[row, cell]) for cell in order]) if order else 0
            assert commit[row].nonzero()[:, 0].tolist() == sorted(order[:number])


def test_random_order_is_a_fixed_function_of_the_sample():
    state = state_with_masks([[1] * 8] * 3)
    proposal = Proposal(ids=state.ids, prob=torch.zeros(3, 10))
    one = d.RandomPolicy().select(state, state.masked, proposal, torch.tensor([3, 3, 3]))
    alone = state.take(torch.tensor([1]))
    two = d.RandomPolicy().select(
        alone, alone.masked, Proposal(ids=alone.ids, prob=proposal.prob[1:2]), torch.tensor([3])
    )
    assert torch.equal(one.commit[1:2], two.commit)
    assert len({tuple(row.tolist()) for row in one.commit}) > 1


def test_noise_dies_down_whatever_the_quota():
    """Three of six cells are written, one a step."""
    backbone, stop = tiny_backbone(), d.DecodeSettings(max_steps=3)
    one, two = (
        decoded(
            d.Decoder(policy=d.NoisyConfidencePolicy(6, 4.0), quota=quota, settings=stop),
            backbone,
            [[4, 5]] * 64,
            6,
        ).ids
        for quota in (d.FixedQuota(), d.EvenQuota(6))
    )
    assert torch.equal(one, two)
    assert len({tuple(row) for row in one.tolist()}) > 1


@pytest.mark.parametrize("policy", [d.RandomPolicy(), d.ConfidencePolicy(), DynamicPolicy()])
def test_order_policies_refuse_a_missing_quota(policy):
    with pytest.raises(ValueError, match=f"quota: {type(policy).__name__} needs one"):
        d.Decoder(policy=policy, quota=d.NoQuota())
