"""Scores of acceptance decisions by hand, and in pieces."""

import math

import pytest
import torch

from lit_dlm.tracelock.metrics import CalibrationCurve, ReplayScore, RolloutProxy
from tests.training.reference import rows


def test_all_scores_of_the_proxy_match_hand_values() -> None:
    """TP 1, FP 2, FN 3, TN 4, a logit at the threshold counts as accepted."""
    metric = RolloutProxy(threshold=0.5)
    metric.update(torch.tensor([0.0, 1.0, 1.0] + [-1.0] * 2), rows("10011")[0])
    metric.update(torch.tensor([-1.0] * 5), rows("10000")[0])
    scores = {name: value.item() for name, value in metric.compute().items()}
    assert [scores[name] for name in ("tp", "fp", "fn", "tn")] == [1, 2, 3, 4]
    expected = {
        "f1": 2 / 7, "accuracy": 0.5, "specificity": 4 / 6, "fpr": 2 / 6, "npv": 4 / 7,
        "accept_rate": 0.3, "positive_rate": 0.4, "precision": 1 / 3, "recall": 0.25,
        "f_beta": 1.25 / 3 / 4 / (0.25 / 3 + 0.25),
    }  # fmt: skip
    assert {name: scores[name] for name in expected} == pytest.approx(expected)


def test_nothing_accepted_is_zero_not_nan() -> None:
    metric = RolloutProxy()
    metric.update(torch.tensor([0.0, 1.0]), torch.tensor([False, False]))
    scores = {name: value.item() for name, value in metric.compute().items()}
    assert all(scores[name] == 0.0 for name in ("f_beta", "f1", "precision", "recall"))
    assert (scores["tn"], scores["specificity"], scores["npv"], scores["fpr"]) == (2, 1.0, 1.0, 0.0)


def test_replay_matches_hand_values() -> None:
    """Responses of four in two bins (masked share up to and above a half).

    Above: one state commits 2 of 4, one wrong: 1/2 step and 1/2 wrong per token. Below: one commits
    1 right, one commits 2 right: 3/4 step, 0 wrong. Means over bins: 5/8 steps and 1/4 wrong a
    token: 4 * 5/8 = 2.5 steps, 1 wrong token, speed-up 8/5, P = 3/4, R = 3/8,
    F0.5 = 1.25 * P * R / (0.25 P + R). A row without a commit does not count.
    """
    metric = ReplayScore(num_bins=2)
    metric.update(
        commit=rows("1100", "0010", "0011", "0000"),
        label=rows("1011", "0010", "0011", "1111"),
        masked=rows("1111", "0011", "0011", "1111"),
        length=torch.tensor([4, 4, 4, 4]),
    )
    assert {name: value.item() for name, value in metric.compute().items()} == pytest.approx(
        {
            "steps": 2.5,
            "speedup": 1.6,
            "false_commits": 1.0,
            "false_rate": 0.25,
            "score": 1.25 * 0.75 * 0.375 / (0.25 * 0.75 + 0.375),
        }
    )
    assert all(value.item() == 0.0 for value in ReplayScore().compute().values())


def test_one_right_token_per_step_saves_nothing() -> None:
    metric = ReplayScore()
    metric.update(rows("1000"), rows("1111"), rows("1111"), torch.tensor([4]))
    scores = metric.compute()
    assert scores["steps"].item() == 4.0
    assert scores["score"].item() == 0.0


def test_calibration_error_matches_hand_value() -> None:
    """Two bins. Low: probs .1 and .3, one right: gap |.4 - 1| / 2; high: .9, right: gap .1.

    ECE = (2 * 0.3 + 1 * 0.1) / 3 = 0.7 / 3, in one batch or two.
    """
    metric = CalibrationCurve(num_bins=2)
    metric.update(torch.tensor([0.1]), torch.tensor([True]))
    metric.update(torch.tensor([0.3, 0.9]), torch.tensor([False, True]))
    curve = metric.compute()
    assert curve["ece"].item() == pytest.approx(0.7 / 3)
    assert curve["prob"].tolist() == pytest.approx([0.2, 0.9])
    assert curve["accuracy"].tolist() == pytest.approx([0.5, 1.0])


def test_edges_belong_to_the_bin_above_and_empty_bins_are_nan() -> None:
    metric = CalibrationCurve(num_bins=4)
    empty = metric.compute()
    assert empty["ece"].item() == 0.0
    assert all(math.isnan(value) for value in empty["prob"].tolist())
    metric.update(torch.tensor([0.0, 0.25, 0.5, 1.0]), torch.ones(4, dtype=torch.bool))
    assert metric.compute()["count"].tolist() == [1, 1, 1, 1]
