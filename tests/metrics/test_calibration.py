import math

import pytest
import torch

from lit_dlm.metrics.acceptance import CalibrationCurve


def test_error_matches_hand_value() -> None:
    """Two bins. Low: probs .1 and .3, one right: gap |.4 - 1| / 2; high: .9, right: gap .1.

    ECE = (2 * 0.3 + 1 * 0.1) / 3 = 0.7 / 3.
    """
    metric = CalibrationCurve(num_bins=2)
    metric.update(torch.tensor([0.1, 0.3, 0.9]), torch.tensor([True, False, True]))
    curve = metric.compute()
    assert curve["ece"].item() == pytest.approx(0.7 / 3)
    assert curve["prob"].tolist() == pytest.approx([0.2, 0.9])
    assert curve["accuracy"].tolist() == pytest.approx([0.5, 1.0])
    assert curve["count"].tolist() == [2, 1]


def test_edges_belong_to_the_bin_above_and_one_to_the_last() -> None:
    metric = CalibrationCurve(num_bins=4)
    metric.update(torch.tensor([0.0, 0.25, 0.5, 1.0]), torch.ones(4, dtype=torch.bool))
    assert metric.compute()["count"].tolist() == [1, 1, 1, 1]


def test_empty_bins_are_nan_and_an_empty_curve_has_no_error() -> None:
    curve = CalibrationCurve(num_bins=3).compute()
    assert curve["ece"].item() == 0.0
    assert all(math.isnan(value) for value in curve["prob"].tolist())


def test_batches_add_up() -> None:
    torch.manual_seed(0)
    prob, label = torch.rand(60), torch.rand(60) > 0.5
    whole, parts = CalibrationCurve(), CalibrationCurve()
    whole.update(prob, label)
    for piece in range(0, 60, 7):
        parts.update(prob[piece : piece + 7], label[piece : piece + 7])
    torch.testing.assert_close(whole.compute(), parts.compute(), equal_nan=True)
