from dataclasses import replace

import pytest
import torch

from lit_dlm.decoding import (
    BlockWindow,
    BudgetQuota,
    ConfidencePolicy,
    Decoder,
    EvenQuota,
    FixedQuota,
    ScheduleQuota,
    prompt_canvas,
)
from tests.decoding.states import in_block, state_with_masks
from tests.fakes import TableBackbone, logits_for


def _candidates(count: int) -> torch.Tensor:
    return torch.ones(1, count, dtype=torch.bool)


def test_fixed_quota_never_exceeds_what_is_left():
    state = state_with_masks([[1, 1, 1], [0, 0, 1]])
    assert FixedQuota(2).counts(state, state.masked).tolist() == [2, 1]


def test_even_quota_gives_the_remainder_to_the_first_steps():
    """10 masks in 4 steps: 10 // 4 = 2 and 10 % 4 = 2, so 3, 3, 2, 2."""
    state = state_with_masks([[1] * 10])
    counts = [
        int(EvenQuota(4).counts(in_block(state, step=s, masks=10), state.masked)) for s in range(4)
    ]
    assert counts == [3, 3, 2, 2]


def test_even_quota_shares_steps_among_blocks():
    """8 steps over 4 blocks are 2 per block; a block of 6 masks commits 3 and 3."""
    state = in_block(state_with_masks([[1] * 6]), step=0, masks=6, num_blocks=4)
    assert EvenQuota(8).counts(state, state.masked).tolist() == [3]
    with pytest.raises(ValueError, match="multiple of the 4 blocks, got 6"):
        EvenQuota(6).counts(state, state.masked)


def test_schedule_quota_with_as_many_steps_as_cells_commits_two_only_at_the_end():
    """Dream's truncating schedule, 256 steps for 256 cells: 0 at step 0, then 1 each, 2 last."""
    quota, left, counts = ScheduleQuota(256), 256, []
    for step in range(256):
        state = state_with_masks([[1]], step=step)
        counts.append(int(quota.counts(state, _candidates(left))))
        left -= counts[-1]
    assert counts == [0] + [1] * 254 + [2]


@pytest.mark.parametrize(
    ("steps", "expected"), [(5, [51] * 4 + [52]), (10, [25] * 5 + [26] * 4 + [27])]
)
def test_schedule_quota_at_256_cells_reveals_the_release_counts(steps, expected):
    """For 5 steps: 256 x 0.1998 = 51.1, then 204.9 x 0.2497 = 51.2 and so on, truncated."""
    quota, left, counts = ScheduleQuota(steps), 256, []
    for step in range(steps):
        counts.append(int(quota.counts(state_with_masks([[1]], step=step), _candidates(left))))
        left -= counts[-1]
    assert counts == expected


def test_even_quota_per_block_needs_no_number_of_blocks():
    """Static remasking of block models: 4 masks in 3 steps are 2, 1, 1; 1 mask is 1, 0, 0."""
    quota = EvenQuota(steps_per_block=3)
    for masks, expected in ((4, [2, 1, 1]), (1, [1, 0, 0])):
        states = [
            in_block(state_with_masks([[1] * 4]), step=s, masks=masks, num_blocks=5)
            for s in range(3)
        ]
        assert [int(quota.counts(state, state.masked)) for state in states] == expected


def test_schedule_quota_per_block_runs_through_the_times_in_each_block():
    """The counts of 5 steps over 256 cells, at a late step of the decode and for two rows."""
    quota, left, counts = ScheduleQuota(steps_per_block=5), 256, []
    for step in range(5):
        state = in_block(state_with_masks([[1], [1]], step=70 + step), step=step, masks=256)
        both = quota.counts(state, torch.ones(2, left, dtype=torch.bool))
        assert both[0] == both[1]
        counts.append(int(both[0]))
        left -= counts[-1]
    assert counts == [51] * 4 + [52]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedQuota(0), "tokens_per_step"),
        (lambda: EvenQuota(0), "steps"),
        (lambda: EvenQuota(steps_per_block=0), "steps_per_block"),
        (lambda: EvenQuota(), "exactly one of steps and steps_per_block"),
        (lambda: ScheduleQuota(4, steps_per_block=2), "exactly one of steps and steps_per_block"),
        (lambda: BudgetQuota(0), "steps"),
    ],
)
def test_bad_settings_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_budget_quota_shares_what_is_left_by_the_steps_left():
    """32 masks in 5 steps: ceil(32/5) = 7, ceil(25/4) = 7, then 6, 6, 6. With 5 masks after two
    steps (more were committed) ceil(5/3) = 2; behind the budget everything goes."""
    quota, left, counts = BudgetQuota(5), 32, []
    for step in range(5):
        state = state_with_masks([[1] * left], step=step)
        counts.append(int(quota.counts(state, state.masked)))
        left -= counts[-1]
    assert counts == [7, 7, 6, 6, 6]
    state = state_with_masks([[1] * 5, [1] * 4 + [0]], step=2)
    assert quota.counts(state, state.masked).tolist() == [2, 2]
    late = state_with_masks([[1] * 3], step=9)
    assert quota.counts(late, late.masked).tolist() == [3]


def test_budget_quota_keeps_a_step_for_every_block():
    """Step 2 of 4, in block 1 of 3: two steps for two blocks, so this block must end now."""
    state = in_block(state_with_masks([[1] * 6], step=2), step=0, masks=3, num_blocks=3)
    state = replace(state, block=torch.tensor([1]))
    assert BudgetQuota(4).counts(state, state.masked).tolist() == [6]
    assert BudgetQuota(5).counts(state, state.masked).tolist() == [2]
    with pytest.raises(ValueError, match="at least one for each of the 3 blocks, got 2"):
        BudgetQuota(2).counts(state, state.masked)


@pytest.mark.parametrize("blocks", [1, 2, 3, 5])
@pytest.mark.parametrize("extra", [0, 1, 3, 20])
def test_a_decode_under_a_budget_ends_within_it(blocks: int, extra: int):
    backbone = TableBackbone(logits_for([4] + [5] * 30, [0.5] * 31))
    canvas = prompt_canvas([[4]], response_length=30, spec=backbone.spec, seeds=[0])
    steps = blocks + extra
    window = BlockWindow(30 // blocks)
    decoder = Decoder(policy=ConfidencePolicy(), quota=BudgetQuota(steps), window=window)
    result = decoder(backbone, canvas)
    assert result.status == ["complete"]
    assert int(result.num_steps[0]) <= steps
