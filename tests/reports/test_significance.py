import math

import numpy as np
import pytest

from lit_dlm.reports.significance import compare_rows, exact_mcnemar, holm, paired_bootstrap
from tests.reports.rows import row


def test_mcnemar_has_the_binomial_values():
    for b, c, expected in (
        (0, 0, 1.0),
        (1, 6, 2 * (1 + 7) / 2**7),  # C(7,0) + C(7,1) = 8
        (6, 1, 2 * (1 + 7) / 2**7),
        (0, 5, 2 * 1 / 2**5),
        (2, 3, 1.0),  # 2 * (1 + 5 + 10) / 32 = 1
        (5, 5, 1.0),  # capped: 2 * 638 / 1024 > 1
        (0, 10, 2 / 2**10),
    ):
        assert exact_mcnemar(b, c) == pytest.approx(expected, rel=1e-12)
    # With 2,000 : 1,900 the normal approximation is good: z = (100 - 1) / sqrt(3900).
    z = 99 / math.sqrt(3900)
    assert exact_mcnemar(1900, 2000) == pytest.approx(math.erfc(z / math.sqrt(2)), rel=0.01)


def test_the_bootstrap_is_repeatable_and_has_the_quantiles_of_the_mean():
    assert paired_bootstrap([1, 1, 1]) == (1.0, 1.0)
    values = np.random.default_rng(0).normal(1.0, 2.0, 400)
    low, high = paired_bootstrap(values)
    assert (low, high) == paired_bootstrap(values)
    # The interval of a mean is about 1.96 standard errors to each side.
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.1 * half)
    # Differences 0 and 1: a resample has mean 0, 1/2 or 1 with weights 1/4, 1/2, 1/4.
    assert paired_bootstrap([0, 1]) == (0.0, 1.0)


def test_holm_multiplies_and_never_falls():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.7]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


def test_only_common_samples_count_and_the_table_of_them_is_right():
    """Common: b, c, d. A is right on b and c, B on c and d: 1 : 1, accuracies 2/3 each."""
    a = [row("a"), row("b", nfe=10), row("c", nfe=10), row("d", nfe=10, correct=False)]
    b = [row(uid, method="n", nfe=4, correct=uid != "b") for uid in "bcdef"]
    found = compare_rows(a, b)
    assert (found.n, found.left_out_a, found.left_out_b) == (3, 1, 2)
    assert (found.only_a, found.only_b, found.p_value) == (1, 1, 1.0)
    assert found.accuracy_a == found.accuracy_b == pytest.approx(2 / 3)
    assert (found.nfe_a, found.nfe_b, found.nfe_interval) == (10.0, 4.0, (-6.0, -6.0))


def test_disjoint_and_ungraded_samples_are_refused():
    with pytest.raises(ValueError, match="no sample in common; A has 1 such as 'a', B has 1"):
        compare_rows([row("a")], [row("b")])
    with pytest.raises(ValueError, match="sample 'a' of 'm' was not graded"):
        compare_rows([row("a", verdict="ungraded")], [row("a")])
