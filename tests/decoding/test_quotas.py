import pytest

import lit_dlm.decoding as d
from lit_dlm.decoding import BudgetQuota, EvenQuota, FixedQuota, ScheduleQuota
from tests.decoding.models import table_backbone
from tests.decoding.states import decoded, state_with_masks


def spent(
    quota: d.Quota, masks: int, *, steps: int, before: int = 0, num_blocks: int = 1
) -> list[int]:
    """What a block of some masks commits, step by step, ``before`` steps after the decode's begin.

    A second row beside it is in the same place.
    """
    left, found = masks, []
    for step in range(steps):
        cells = [1] * left + [0] * (masks - left)
        counts = {"step": before + step, "block_step": step, "block_masks": masks}
        state = state_with_masks([cells] * 2, num_blocks, **counts)
        one, other = quota.counts(state, state.masked).tolist()
        assert one == other
        found.append(one)
        left -= one
    return found


@pytest.mark.parametrize(
    ("quota", "masks", "options", "expected"),
    [
        # 10 masks in 4 steps: 10 // 4 = 2 and 10 % 4 = 2.
        (EvenQuota(4), 10, {}, [3, 3, 2, 2]),
        # 8 steps over 4 blocks are 2 per block.
        (EvenQuota(8), 6, {"num_blocks": 4}, [3, 3]),
        # Static remasking of block models, which needs no number of blocks.
        (EvenQuota(steps_per_block=3), 4, {"num_blocks": 5}, [2, 1, 1]),
        (EvenQuota(steps_per_block=3), 1, {"num_blocks": 5}, [1, 0, 0]),
        # Dream's truncating schedule with as many steps as cells.
        (ScheduleQuota(256), 256, {}, [0] + [1] * 254 + [2]),
        # 256 x 0.1998 = 51.1, then 204.9 x 0.2497 = 51.2 and so on, truncated.
        (ScheduleQuota(5), 256, {}, [51] * 4 + [52]),
        (ScheduleQuota(10), 256, {}, [25] * 5 + [26] * 4 + [27]),
        # Each block runs through the times, also late in the decode.
        (ScheduleQuota(steps_per_block=5), 256, {"before": 70}, [51] * 4 + [52]),
        # ceil(32/5) = 7, ceil(25/4) = 7, then 6, 6, 6.
        (BudgetQuota(5), 32, {}, [7, 7, 6, 6, 6]),
        # After two steps ceil(5/3) = 2; behind the budget everything goes.
        (BudgetQuota(5), 5, {"before": 2}, [2, 2, 1]),
        (BudgetQuota(5), 3, {"before": 9}, [3]),
        (FixedQuota(2), 3, {}, [2, 1]),
    ],
)
def test_what_a_block_commits_step_by_step(quota, masks, options, expected):
    assert spent(quota, masks, steps=len(expected), **options) == expected


def test_rows_with_different_masks_get_their_own_counts():
    state = state_with_masks([[1, 1, 1], [0, 0, 1]])
    assert FixedQuota(2).counts(state, state.masked).tolist() == [2, 1]
    budget = state_with_masks([[1] * 5, [1] * 4 + [0]], step=2)
    assert BudgetQuota(5).counts(budget, budget.masked).tolist() == [2, 2]


def test_budget_quota_keeps_a_step_for_every_block():
    """Step 2 of 4, in block 1 of 3: two steps for two blocks, so this block must end now."""
    state = state_with_masks([[1] * 6], 3, step=2, block=1)
    assert BudgetQuota(4).counts(state, state.masked).tolist() == [6]
    assert BudgetQuota(5).counts(state, state.masked).tolist() == [2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedQuota(0), "tokens_per_step"),
        (lambda: EvenQuota(0), "steps"),
        (lambda: EvenQuota(steps_per_block=0), "steps_per_block"),
        (lambda: EvenQuota(), "exactly one of steps and steps_per_block"),
        (lambda: ScheduleQuota(4, steps_per_block=2), "exactly one of steps and steps_per_block"),
        (lambda: BudgetQuota(0), "steps"),
        (lambda: spent(EvenQuota(6), 6, steps=1, num_blocks=4), "multiple of the 4 blocks, got 6"),
        (lambda: spent(BudgetQuota(2), 6, steps=1, num_blocks=3), "each of the 3 blocks, got 2"),
    ],
)
def test_bad_settings_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("blocks", [1, 2, 3, 5])
@pytest.mark.parametrize("extra", [0, 1, 3, 20])
def test_a_decode_under_a_budget_ends_within_it(blocks: int, extra: int):
    steps, window = blocks + extra, d.BlockWindow(30 // blocks)
    decoder = d.Decoder(policy=d.ConfidencePolicy(), quota=BudgetQuota(steps), window=window)
    result = decoded(decoder, table_backbone([5] * 30, [0.5] * 30), [[4, 4]], 30)
    assert result.status == ["complete"]
    assert int(result.num_steps[0]) <= steps
