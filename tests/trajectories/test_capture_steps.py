from __future__ import annotations

import math

import numpy as np
import pytest

from lit_dlm.trajectories.capture import KeptSteps


@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.3, 0.1, 1 / 7])
def test_each_stratum_keeps_one_step(ratio):
    """Stratum j is ceil(j / ratio) to ceil((j + 1) / ratio) - 1."""
    plan = KeptSteps([1, 2, 3], ratio=ratio)
    for row in range(3):
        kept = plan.steps(row, 1000)
        for j in range(int(1000 * ratio) - 1):
            low, high = math.ceil(j / ratio), math.ceil((j + 1) / ratio)
            assert sum(low <= step < high for step in kept) == 1


def test_the_choice_depends_on_the_seed_alone():
    alone = KeptSteps([7], ratio=0.2).steps(0, 300)
    assert KeptSteps([3, 7, 9], ratio=0.2).steps(1, 300) == alone
    assert KeptSteps([3], ratio=0.2).steps(0, 300) != alone
    late = KeptSteps([7], ratio=0.2)
    assert [step for step in range(300) if 0 in late.rows(step)] == alone
    assert KeptSteps([7], ratio=0.2).steps(0, 120) == [step for step in alone if step < 120]


def test_every_step_is_kept_equally_often():
    """With ratio 0.25 each of 40 steps is kept by a quarter of 2,000 rows: 500 +- 97 (5 sigma)."""
    plan = KeptSteps(range(2000), ratio=0.25)
    counts = np.array([len(plan.rows(step)) for step in range(40)])
    assert counts.sum() == 2000 * 10
    assert np.abs(counts - 500).max() < 97
