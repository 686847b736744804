"""Group advantages and step-wise estimates against hand values, a slow loop and invariants."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_dlm.rl.advantages import (
    Advantage,
    GroupZScore,
    LeaveOneOut,
    RawReward,
    StepGAE,
    outcome_rewards,
)


@pytest.mark.parametrize(
    ("advantage", "rewards", "expected"),
    [
        # Mean 1/2, population deviation sqrt(4 * 1/4 / 4) = 1/2; equal rewards have none.
        (GroupZScore(), [[1.0, 0.0, 0.0, 1.0], [0.3] * 4], [[1.0, -1.0, -1.0, 1.0], [0.0] * 4]),
        # 3 - 0, then 0 - 3/2 twice. One alone has nobody to compare with.
        (LeaveOneOut(), [3.0, 0.0, 0.0], [3.0, -1.5, -1.5]),
        (LeaveOneOut(), [5.0], [0.0]),
        (RawReward(), [3.0, 0.0], [3.0, 0.0]),
    ],
)
def test_advantages_by_hand(advantage: Advantage, rewards: Any, expected: Any) -> None:
    found = advantage.compute(torch.tensor(rewards))
    torch.testing.assert_close(found, torch.tensor(expected))


def test_the_example_is_a_plain_class_that_ranks_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thrice those above less those below, of the three others."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    ranks = import_module("advantage").RankAdvantage(scale=3.0)
    assert isinstance(ranks, Advantage)
    assert ranks.compute(torch.tensor([3.0, 0.0, 3.0, 1.0])).tolist() == [2.0, -3.0, 2.0, -1.0]


def random_case(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 5, 9, generator=generator, dtype=torch.float64)
    steps = torch.randint(0, 4, (5, 9), generator=generator)
    members = torch.rand(5, 9, generator=generator) < 0.8
    members[3] = False
    return rewards, values, steps, members


def slow(
    rewards: Tensor, values: Tensor, steps: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Returns and advantages of one row without left-out cells, by the definitions."""
    returns, advantages = torch.empty_like(rewards), torch.empty_like(rewards)
    R, V, A = 0.0, 0.0, 0.0
    for step in sorted(set(steps.tolist()), reverse=True):
        own = steps == step
        returns[own] = rewards[own] + gamma * R
        advantages[own] = rewards[own] - values[own] + gamma * V + gamma * lam * A
        reward, value = float(rewards[own].mean()), float(values[own].mean())
        R, V, A = reward + gamma * R, value, reward - value + gamma * V + gamma * lam * A
    return returns, advantages


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.7), (1.0, 0.0), (0.5, 1.0)])
def test_equals_a_slow_loop(gamma: float, lam: float) -> None:
    """Cells left out get 0 and have no part; only the order of steps counts, not their numbers."""
    rewards, values, steps, members = random_case(3)
    found = torch.stack(
        StepGAE(gamma=gamma, lam=lam).compute(rewards, values, 3 * steps + 4, members)
    )
    expected = torch.zeros(2, *members.shape, dtype=torch.float64)
    for row, kept in enumerate(members):
        given = (one[row, kept] for one in (rewards, values, steps))
        expected[:, row, kept] = torch.stack(slow(*given, gamma, lam))
    torch.testing.assert_close(found, expected)


def test_outcome_reward_without_discount_gives_every_token_the_reward() -> None:
    """g = l = 1 and an outcome reward R: R_k = R and A_k = R - V_k for every token."""
    _, values, steps, members = random_case(5)
    totals = torch.randn(5, dtype=torch.float64)
    rewards = outcome_rewards(totals, steps, members)
    returns, advantages = StepGAE().compute(rewards, values, steps, members)
    expected = torch.where(members, totals[:, None], 0.0)
    # Not in the last step, where a token keeps its own reward: the same number here.
    torch.testing.assert_close(returns, expected)
    torch.testing.assert_close(advantages, torch.where(members, expected - values, 0.0))
