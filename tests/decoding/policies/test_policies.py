import pytest
import torch

from lit_dlm.decoding import (
    ConfidencePolicy,
    EntropyPolicy,
    MarginPolicy,
    Proposal,
    RandomPolicy,
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


def test_only_masked_cells_are_chosen():
    assert _commits(ConfidencePolicy(), [0.95, 0.2, 0.3, 0.4], masks=((0, 1, 1, 1),)) == [5]


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


@pytest.mark.parametrize("policy", [RandomPolicy(), ConfidencePolicy()])
def test_order_policies_refuse_a_missing_quota(policy):
    state = state_with_masks([[1, 1]])
    with pytest.raises(ValueError, match="needs one"):
        policy.select(state, state.masked, Proposal(ids=state.ids, prob=torch.zeros(1, 4)), None)


def test_a_threshold_outside_probabilities_is_refused():
    with pytest.raises(ValueError, match=r"threshold: expected a probability in 0\.\.1, got 90"):
        ThresholdPolicy(90)
