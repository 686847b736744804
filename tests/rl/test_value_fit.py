"""Scores from sums, by hand and in pieces."""

import math

import pytest
import torch

from lit_dlm.rl.metrics import Quotient, ValueFit

VALUES = torch.tensor([1.0, 0.0, 2.0, 9.0])
RETURNS = torch.tensor([1.0, -1.0, 3.0, -9.0])
COUNTED = torch.tensor([True, True, True, False])


@pytest.mark.parametrize("sizes", [[4], [1, 1, 1, 1], [3, 1]])
def test_scores_do_not_depend_on_batches(sizes: list[int]) -> None:
    """Errors 0, 1, -1; the returns 1, -1, 3 have mean 1 and variance 8/3."""
    error, explained = ValueFit("error"), ValueFit("explained")
    parts = zip(*(rows.split(sizes) for rows in (VALUES, RETURNS, COUNTED)), strict=True)
    for values, returns, counted in parts:
        error.update(values, returns, counted)
        explained.update(values, returns, counted)
    assert float(error.compute()) == pytest.approx(math.sqrt(2 / 3))
    assert float(explained.compute()) == pytest.approx(1 - (2 / 3) / (8 / 3))


def test_nothing_is_explained_where_returns_do_not_vary() -> None:
    explained = ValueFit("explained")
    explained.update(VALUES, torch.ones(4), COUNTED)
    assert explained.compute() == 0.0


def test_sums_stay_exact_in_a_model_of_bfloat16() -> None:
    """1000 and 1001 are one number in bfloat16."""
    quotient = Quotient().to(torch.bfloat16)
    for _ in range(1001):
        quotient.update(torch.tensor(1.0), 1.0)
    quotient.update(torch.tensor(1.0), 0.0)
    torch.testing.assert_close(quotient.compute(), torch.tensor(1002 / 1001))
    quotient.reset()
    quotient.update(torch.tensor(0.0), 0.0)
    assert quotient.compute() == 0.0
