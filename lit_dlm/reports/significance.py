"""Whether two decoders differ on the same samples: paired tests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from lit_dlm.reports.results import ResultRow

NUM_RESAMPLES = 10_000


@dataclass(frozen=True, kw_only=True)
class PairedComparison:
    """Two methods on the samples that both have. Differences are B minus A."""

    task: str
    method_a: str
    method_b: str
    n: int
    left_out_a: int  # samples of A that B lacks, or that either side has not graded
    left_out_b: int
    differing: int  # samples whose problem or template is another one in B
    accuracy_a: float
    accuracy_b: float
    accuracy_interval: tuple[float, float]  # 95 % interval of the difference, paired bootstrap
    only_a: int  # samples that only A got right
    only_b: int
    p_value: float  # exact McNemar test of equal accuracy, two-sided
    p_adjusted: float  # the same, adjusted for all comparisons made at once (Holm)
    nfe_a: float  # mean forwards of the backbone per sample
    nfe_b: float
    nfe_interval: tuple[float, float]


def exact_mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided p-value: 1 against 6 gives ``2 * (C(7,0) + C(7,1)) / 2^7 = 0.125``."""
    # Samples that both got right, or both wrong, say nothing of which method is better. Under equal
    # accuracy the others are fair coins. Counts stay exact integers: for a thousand of them, 2**-n
    # and the binomials would each leave the range of floats.
    total = only_a + only_b
    tail = sum(math.comb(total, k) for k in range(min(only_a, only_b) + 1))
    return min(1.0, 2 * tail / 2**total)  # both tails hold the middle where the counts are equal


def paired_bootstrap(differences: ArrayLike) -> tuple[float, float]:
    """95 % percentile interval of the mean of differences ``(n,)``, B minus A for each sample."""
    # Samples are drawn, each with both results: what makes a problem hard is common to both, and
    # leaves the difference. Drawing each method's samples apart would widen the interval.
    values = np.asarray(differences, dtype=np.float64)
    generator = np.random.default_rng(0)  # reports are reproducible
    means = np.empty(NUM_RESAMPLES)
    chunk = max(1, 2_000_000 // len(values))  # 16 MB of indices at a time
    for first in range(0, NUM_RESAMPLES, chunk):
        size = min(chunk, NUM_RESAMPLES - first)
        drawn = generator.integers(len(values), size=(size, len(values)))
        means[first : first + size] = values[drawn].mean(1)
    tail = (1.0 - 0.95) / 2.0
    low, high = np.quantile(means, [tail, 1.0 - tail])
    return float(low), float(high)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusts p-values for their number: ``[0.01, 0.04, 0.03]`` to ``[0.03, 0.06, 0.06]``."""
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        # The factor falls from one to the next, the result may not: a comparison is never more
        # significant than one with a smaller p.
        highest = max(highest, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = highest
    return adjusted


def _pairs(
    task: str, first: Mapping[str, ResultRow], second: Mapping[str, ResultRow]
) -> list[tuple[ResultRow, ResultRow]]:
    """The rows of both that were graded, by uid."""
    both = ((first[uid], second[uid]) for uid in sorted(first.keys() & second.keys()))
    # What was not graded is not ``correct``, and would count as wrong.
    pairs = [pair for pair in both if all(row.verdict != "ungraded" for row in pair)]
    if not pairs:
        raise ValueError(
            f"task {task!r}: no graded sample in common; A has {len(first)} such as "
            f"{min(first)!r}, B has {len(second)} such as {min(second)!r}"
        )
    return pairs


def compare_rows(rows_a: Sequence[ResultRow], rows_b: Sequence[ResultRow]) -> PairedComparison:
    """Compares two methods on the uids that both have; p is not adjusted for other comparisons."""
    # Of several responses to a prompt the first: the tests assume independent samples.
    first, second = (
        {row.uid: row for row in rows if row.response == 0} for rows in (rows_a, rows_b)
    )
    pairs = _pairs(rows_a[0].task, first, second)
    # The test is on verdicts; accuracies and their interval on points, which may be fractions.
    right = np.array([(a.correct, b.correct) for a, b in pairs], dtype=np.int64)
    points = np.array([(a.points, b.points) for a, b in pairs])
    nfe = np.array([(a.nfe, b.nfe) for a, b in pairs], dtype=np.int64)
    only_a, only_b = (int((right[:, k] > right[:, 1 - k]).sum()) for k in (0, 1))
    p_value = exact_mcnemar(only_a, only_b)
    return PairedComparison(
        task=rows_a[0].task,
        method_a=rows_a[0].method,
        method_b=rows_b[0].method,
        n=len(pairs),
        left_out_a=len(first) - len(pairs),
        left_out_b=len(second) - len(pairs),
        differing=sum(a.problem != b.problem for a, b in pairs),
        accuracy_a=float(points[:, 0].mean()),
        accuracy_b=float(points[:, 1].mean()),
        accuracy_interval=paired_bootstrap(points[:, 1] - points[:, 0]),
        only_a=only_a,
        only_b=only_b,
        p_value=p_value,
        p_adjusted=p_value,
        nfe_a=float(nfe[:, 0].mean()),
        nfe_b=float(nfe[:, 1].mean()),
        nfe_interval=paired_bootstrap(nfe[:, 1] - nfe[:, 0]),
    )
