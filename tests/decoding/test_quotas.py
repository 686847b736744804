import pytest
import torch

from lit_dlm.decoding import EvenQuota, FixedQuota, NoQuota, ScheduleQuota
from tests.decoding.states import in_block, state_with_masks


def _candidates(count: int) -> torch.Tensor:
    return torch.ones(1, count, dtype=torch.bool)


def test_no_quota_leaves_the_number_to_the_policy():
    assert NoQuota().counts(state_with_masks([[1, 1]]), _candidates(2)) is None


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


def test_even_quota_refuses_steps_that_blocks_cannot_share():
    state = in_block(state_with_masks([[1] * 6]), step=0, masks=6, num_blocks=4)
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
        (lambda: FixedQuota(0), "tokens_per_step: expected at least 1, got 0"),
        (lambda: EvenQuota(0), "steps: expected at least 1, got 0"),
        (lambda: EvenQuota(steps_per_block=0), "steps_per_block: expected at least 1, got 0"),
        (lambda: EvenQuota(), "expected exactly one of steps and steps_per_block, got neither"),
        (lambda: ScheduleQuota(4, steps_per_block=2), "got steps and steps_per_block"),
        (lambda: ScheduleQuota(4, eps=1.0), "eps: expected a number between 0 and 1, got 1.0"),
    ],
)
def test_bad_settings_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()
