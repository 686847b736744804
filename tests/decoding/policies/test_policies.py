import pytest
import torch

from lit_dlm.decoding import (
    ConfidencePolicy,
    Decoder,
    DynamicPolicy,
    EntropyBoundedPolicy,
    EntropyPolicy,
    MarginPolicy,
    NoQuota,
    Proposal,
    RandomPolicy,
    SequentialPolicy,
    ThresholdPolicy,
)
from tests.decoding.states import state_with_masks


def _proposal(prob: list[float]) -> Proposal:
    """Scores chosen so that each policy prefers another cell."""
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


def test_each_heuristic_commits_its_own_favourite():
    prob = [0.95, 0.2, 0.3, 0.4]
    assert _commits(ConfidencePolicy(), prob) == [2]
    assert _commits(EntropyPolicy(), prob) == [3]
    assert _commits(MarginPolicy(), prob) == [4]
    assert _commits(EntropyPolicy(), prob, quota=2) == [3, 4]


def test_threshold_commits_all_that_reach_it_and_nothing_else():
    assert _commits(ThresholdPolicy(0.9), [0.9, 0.95, 0.89, 0.1], quota=None) == [2, 3]
    assert _commits(ThresholdPolicy(0.9), [0.1, 0.2, 0.3, 0.4], quota=None) == []


def test_threshold_with_a_quota_is_never_slower_than_the_quota():
    assert _commits(ThresholdPolicy(0.9), [0.1, 0.2, 0.3, 0.4], quota=2) == [4, 5]
    assert _commits(ThresholdPolicy(0.9), [0.95, 0.2, 0.3, 0.4], quota=2) == [2, 5]


def test_random_order_is_a_fixed_function_of_the_sample():
    state = state_with_masks([[1] * 8] * 3)
    proposal = Proposal(ids=state.ids, prob=torch.zeros(3, 10))
    one = RandomPolicy().select(state, state.masked, proposal, torch.tensor([3, 3, 3]))
    alone = state.take(torch.tensor([1]))
    two = RandomPolicy().select(
        alone, alone.masked, Proposal(ids=alone.ids, prob=proposal.prob[1:2]), torch.tensor([3])
    )
    assert torch.equal(one.commit[1:2], two.commit)
    assert len({tuple(row.tolist()) for row in one.commit}) > 1


@pytest.mark.parametrize("policy", [RandomPolicy(), ConfidencePolicy(), DynamicPolicy()])
def test_order_policies_refuse_a_missing_quota(policy):
    with pytest.raises(ValueError, match=f"quota: {type(policy).__name__} needs one"):
        Decoder(policy=policy, quota=NoQuota())


def test_sequential_takes_the_leftmost_masks():
    prob = [0.1, 0.9, 0.2, 0.8]
    assert _commits(SequentialPolicy(), prob, quota=2) == [2, 3]
    assert _commits(SequentialPolicy(), prob, quota=1, masks=((0, 0, 1, 1),)) == [4]


def test_dynamic_remasking_is_strict_and_at_least_the_quota():
    """dLLM-RL's block sampler: 0.9 is not over 0.9; one over the threshold, so the best two."""
    assert _commits(DynamicPolicy(0.9), [0.9, 0.2, 0.3, 0.4], quota=1) == [2]
    assert _commits(DynamicPolicy(0.9), [0.9, 0.95, 0.3, 0.4], quota=1) == [3]
    assert _commits(DynamicPolicy(0.9), [0.95, 0.2, 0.3, 0.4], quota=2) == [2, 5]
    assert _commits(DynamicPolicy(0.9), [0.95, 0.91, 0.92, 0.4], quota=2) == [2, 3, 4]


@pytest.mark.parametrize(
    ("bound", "quota", "cells"),
    [
        (0.35, None, [3]),  # even the smallest entropy is over the bound: one all the same
        (1.0, None, [3]),  # 0.5, then 0.5 + 1.0 = 1.5
        (1.6, None, [3, 4]),  # 1.5, then 3.5
        (1.5, None, [3]),  # a sum that equals the bound is not under it
        (3.6, None, [2, 3, 4]),  # 3.5, then 6.5
        (1.0, 3, [2, 3, 4]),
    ],
)
def test_entropy_bounded_sums_the_smallest_entropies(bound, quota, cells):
    """Entropies of the cells: 2.0, 0.5, 1.0, 3.0."""
    assert _commits(EntropyBoundedPolicy(bound), [0.5] * 4, quota=quota) == cells


def test_entropy_bounded_counts_masked_cells_only():
    """The cell with entropy 0.5 is filled: 1.0 is the smallest, 1.0 + 2.0 = 3.0 the next sum."""
    assert _commits(EntropyBoundedPolicy(3.1), [0.5] * 4, quota=None, masks=((1, 0, 1, 1),)) == [
        2,
        4,
    ]
    with pytest.raises(ValueError, match="bound"):
        EntropyBoundedPolicy(0.0)
