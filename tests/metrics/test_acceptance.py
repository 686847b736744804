import pytest
import torch

from lit_dlm.metrics.acceptance import RolloutProxy


def test_batches_are_micro_averaged() -> None:
    torch.manual_seed(0)
    logits, label = torch.randn(50) * 3, torch.rand(50) > 0.4
    whole, parts = RolloutProxy(threshold=0.8), RolloutProxy(threshold=0.8)
    whole.update(logits, label)
    for piece in range(0, 50, 7):
        parts.update(logits[piece : piece + 7], label[piece : piece + 7])
    assert whole.compute() == parts.compute()


def test_nothing_accepted_is_zero_not_nan() -> None:
    metric = RolloutProxy()
    metric.update(torch.tensor([0.0, 1.0]), torch.tensor([False, False]))
    scores = {name: value.item() for name, value in metric.compute().items()}
    assert all(scores[name] == 0.0 for name in ("f_beta", "f1", "precision", "recall"))
    assert scores["accept_rate"] == 0.0
    assert (scores["tn"], scores["specificity"], scores["npv"], scores["fpr"]) == (2, 1.0, 1.0, 0.0)


def test_all_scores_match_hand_values() -> None:
    """TP 1, FP 2, FN 3, TN 4: F1 2/7, accuracy 5/10, specificity 4/6, NPV 4/7, positives 4/10."""
    metric = RolloutProxy(threshold=0.5)
    accept = torch.tensor([1.0] * 3 + [-1.0] * 7)
    metric.update(accept, torch.tensor([1, 0, 0, 1, 1, 1, 0, 0, 0, 0], dtype=torch.bool))
    scores = {name: value.item() for name, value in metric.compute().items()}
    assert [scores[name] for name in ("tp", "fp", "fn", "tn")] == [1, 2, 3, 4]
    expected = {
        "f1": 2 / 7, "accuracy": 0.5, "specificity": 4 / 6, "fpr": 2 / 6, "npv": 4 / 7,
        "accept_rate": 0.3, "positive_rate": 0.4, "precision": 1 / 3, "recall": 0.25,
        "f_beta": 1.25 / 3 / 4 / (0.25 / 3 + 0.25),
    }  # fmt: skip
    assert {name: scores[name] for name in expected} == pytest.approx(expected)


def test_logit_equal_to_the_threshold_is_accepted() -> None:
    metric = RolloutProxy(threshold=0.5)
    metric.update(torch.tensor([0.0]), torch.tensor([True]))
    assert metric.compute()["recall"].item() == 1.0
