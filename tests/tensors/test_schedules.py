"""Training states: exact counts, even spread, and the learning rate factor."""

import pytest
import torch

from lit_dlm.tensors.schedules import (
    hidden_cells,
    stratified_counts,
    suffix_cells,
    uniform_cells,
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_counts_of_a_batch_as_large_as_the_length_hit_every_count_once() -> None:
    """Eight strata of 1..8 hold one count each."""
    assert sorted(stratified_counts(8, 8, generator=generator()).tolist()) == list(range(1, 9))


@pytest.mark.parametrize(("rows", "length"), [(1, 5), (7, 3), (64, 32)])
def test_counts_spread_evenly_and_stay_in_range(rows: int, length: int) -> None:
    counts = stratified_counts(rows, length, generator=generator(1)).sort().values
    assert 1 <= counts.min() <= counts.max() <= length
    strata = torch.arange(rows) * length / rows
    assert (counts >= strata.floor()).all()
    assert (counts <= strata.add(length / rows).floor() + 1).all()


def test_uniform_cells_hide_exactly_the_count_and_every_cell_alike() -> None:
    """Count 1 of 4 cells in 4,000 rows: each cell about 1,000 times."""
    hidden = uniform_cells(torch.ones(4_000, dtype=torch.long), 4, generator=generator())
    assert hidden.sum(1).eq(1).all()
    assert all(abs(int(n) - 1_000) < 140 for n in hidden.sum(0))


def test_suffix_cells_are_the_last_ones() -> None:
    found = suffix_cells(torch.tensor([1, 3, 0]), 4).int()
    assert found.tolist() == [[0, 0, 0, 1], [0, 1, 1, 1], [0, 0, 0, 0]]


def test_suffix_share_decides_between_the_two_kinds() -> None:
    hidden = hidden_cells(16, 8, suffix_share=1.0, generator=generator())
    assert hidden.tolist() == suffix_cells(hidden.sum(1), 8).tolist()
    mixed = hidden_cells(400, 8, suffix_share=0.25, generator=generator())
    is_suffix = (mixed == suffix_cells(mixed.sum(1), 8)).all(1)
    # A uniform draw is a suffix by chance in (1 + 1/8 + ... + 1/70 + ... + 1)/8, about 0.29.
    assert 0.38 < is_suffix.float().mean() < 0.56
