import pytest
import torch

import lit_dlm.decoding as d
from lit_dlm.decoding import DynamicPolicy, EntropyBoundedPolicy, Proposal, ThresholdPolicy
from tests.decoding.states import state_with_masks


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


@pytest.mark.parametrize("policy", [d.RandomPolicy(), d.ConfidencePolicy(), DynamicPolicy()])
def test_order_policies_refuse_a_missing_quota(policy):
    with pytest.raises(ValueError, match=f"quota: {type(policy).__name__} needs one"):
        d.Decoder(policy=policy, quota=d.NoQuota())
