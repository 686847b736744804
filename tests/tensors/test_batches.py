"""Batches by tokens: nothing is lost, nothing exceeds the limit, little of them is padding."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from lit_dlm.tensors.batches import DeviceTable, TensorBatch, token_batches


@dataclass
class Inner(TensorBatch):
    ids: torch.Tensor


@dataclass
class Outer(TensorBatch):
    inner: Inner
    weight: torch.Tensor
    values: torch.Tensor | None
    start: int


def test_a_batch_moves_with_the_batches_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Outer(inner=Inner(torch.arange(3)), weight=torch.ones(2), values=None, start=4)
    moved = batch.to("meta")
    assert moved.inner.ids.device.type == moved.weight.device.type == "meta"
    assert (moved.values, moved.start) == (None, 4)
    assert batch.weight.device.type == "cpu"
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda value: value + 1)  # needs a GPU
    pinned = batch.pin_memory()
    assert pinned.inner.ids.tolist() == [1, 2, 3]
    assert pinned.weight.tolist() == [2, 2]


def padded(sizes: np.ndarray, rows: np.ndarray) -> int:
    return len(rows) * int(sizes[rows].max(0).sum())


@given(
    sizes=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 60)), min_size=1, max_size=60),
    max_tokens=st.integers(1, 200),
)
def test_every_row_is_in_one_batch_that_fits(sizes: list[tuple[int, int]], max_tokens: int) -> None:
    table = np.array(sizes)
    batches = token_batches(table, max_tokens)
    assert sorted(np.concatenate(batches)) == list(range(len(table)))
    for rows in batches:
        assert padded(table, rows) <= max_tokens or len(rows) == 1


def test_prompts_and_responses_are_padded_apart() -> None:
    """Rows of 1 + 6 and 6 + 1 tokens: two of a kind take 14, two of both kinds would take 24."""
    sizes = np.array([(1, 6), (6, 1), (1, 6), (6, 1)])
    found = [sorted(rows) for rows in token_batches(sizes, 14)]
    assert sorted(found) == [[0, 2], [1, 3]]


def test_little_is_padding_where_lengths_vary_much() -> None:
    """Lognormal responses: at least 0.8 of the tokens are real, of random batches less than 0.5."""
    rng = np.random.default_rng(0)
    responses = np.clip(rng.lognormal(5.5, 0.6, 2000), 16, 2000).astype(int)
    sizes = np.stack([rng.integers(50, 300, 2000), responses], axis=1)
    batches = token_batches(sizes, 16384)
    assert sizes.sum() / sum(padded(sizes, rows) for rows in batches) > 0.8
    at_random = rng.permutation(2000).reshape(-1, 25)
    assert sizes.sum() / sum(padded(sizes, rows) for rows in at_random) < 0.5


def test_a_table_is_uploaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    table = DeviceTable(torch.tensor([0.5, 0.25, 2.0]))
    assert len(table) == 3
    assert table[torch.tensor([2, 0, 2])].tolist() == [2.0, 0.5, 2.0]
    elsewhere = torch.zeros(4, 2, dtype=torch.long, device="meta")
    assert table[elsewhere].shape == (4, 2)
    monkeypatch.setattr(torch.Tensor, "to", None)
    assert table[elsewhere].device.type == "meta"
