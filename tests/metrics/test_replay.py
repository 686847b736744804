import pytest
import torch

from lit_dlm.metrics.acceptance import ReplayScore


def rows(*values: str) -> torch.Tensor:
    return torch.tensor([[char == "1" for char in row] for row in values])


def test_hand_values() -> None:
    """Responses of four in two bins (masked share up to and above a half).

    Above: one state commits 2 of 4, one wrong: 1/2 step and 1/2 wrong per token. Below: one commits
    1 right, one commits 2 right: 3/4 step, 0 wrong. Means over bins: 5/8 steps and 1/4 wrong a
    token: 4 * 5/8 = 2.5 steps, 1 wrong token, speed-up 8/5, P = 3/4, R = 3/8,
    F0.5 = 1.25 * P * R / (0.25 P + R).
    """
    metric = ReplayScore(num_bins=2)
    metric.update(
        commit=rows("1100", "0010", "0011"),
        label=rows("1011", "0010", "0011"),
        masked=rows("1111", "0011", "0011"),
        length=torch.tensor([4, 4, 4]),
    )
    scores = {name: value.item() for name, value in metric.compute().items()}
    assert scores == pytest.approx(
        {
            "steps": 2.5,
            "speedup": 1.6,
            "false_commits": 1.0,
            "false_rate": 0.25,
            "score": 1.25 * 0.75 * 0.375 / (0.25 * 0.75 + 0.375),
        }
    )


def test_one_right_token_per_step_saves_nothing() -> None:
    metric = ReplayScore()
    metric.update(rows("1000"), rows("1111"), rows("1111"), torch.tensor([4]))
    scores = metric.compute()
    assert scores["steps"].item() == 4.0
    assert scores["score"].item() == 0.0


def test_rows_without_a_commit_and_no_data_do_not_count() -> None:
    metric = ReplayScore()
    metric.update(rows("00"), rows("11"), rows("00"), torch.tensor([2]))
    assert all(value.item() == 0.0 for value in metric.compute().values())
