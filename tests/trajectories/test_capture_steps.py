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


@pytest.mark.parametrize(("num_steps", "least", "share"), [(128, 38, 1 / 3), (256, 76, 2 / 3)])
def test_counts_of_the_release_at_its_ratio(num_steps, least, share):
    """The release keeps round(0.3 * 128) = 38 and round(0.3 * 256) = 77 steps; so do we on average.

    The last stratum is cut: of 127 .. 129 only 127 is a step of 128 (38 1/3 kept on average), of
    254 .. 256 two are steps of 256 (76 2/3). A share of 500 rows is within 5 * sqrt(2/9 / 500).
    """
    plan = KeptSteps(range(500), ratio=0.3)
    counts = np.zeros(500, dtype=int)
    for step in range(num_steps):
        counts[plan.rows(step)] += 1
    assert set(counts.tolist()) == {least, least + 1}
    assert abs((counts == least + 1).mean() - share) < 0.106
    assert round(counts.mean()) == {128: 38, 256: 77}[num_steps]
