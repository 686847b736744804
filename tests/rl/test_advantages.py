"""Group advantages and step-wise estimates against hand values, a slow loop and invariants."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lit_dlm.rl.advantages import (
    GroupZScore,
    LeaveOneOut,
    RawReward,
    StepGAE,
    as_advantage,
    outcome_rewards,
)


def test_zscore_takes_the_population_deviation() -> None:
    """Rewards 1, 0, 0, 1: mean 1/2, deviation sqrt(4 * 1/4 / 4) = 1/2."""
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.3, 0.3, 0.3, 0.3]])
    expected = torch.tensor([[1.0, -1.0, -1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(GroupZScore().compute(rewards), expected)


def test_leave_one_out_compares_with_the_others() -> None:
    """Rewards 3, 0, 0: 3 - 0, then 0 - 3/2 twice. One alone has nobody to compare with."""
    expected = torch.tensor([3.0, -1.5, -1.5])
    torch.testing.assert_close(LeaveOneOut().compute(torch.tensor([3.0, 0.0, 0.0])), expected)
    assert LeaveOneOut().compute(torch.tensor([5.0])).tolist() == [0.0]


def test_the_example_ranks_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thrice those above less those below, of the three others."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    ranks = import_module("advantage").RankAdvantage(scale=3.0)
    found = as_advantage(ranks).compute(torch.tensor([3.0, 0.0, 3.0, 1.0]))
    assert found.tolist() == [2.0, -3.0, 2.0, -1.0]


def test_short_names_stand_for_classes_and_others_are_refused() -> None:
    names = {"group_zscore": GroupZScore, "leave_one_out": LeaveOneOut, "none": RawReward}
    for name, kind in names.items():
        assert type(as_advantage(name)) is kind


class Halves:
    """Knows the protocol by its method alone."""

    def compute(self, rewards: Tensor) -> Tensor:
        return rewards / 2


class Nothing:
    """Has another method."""

    def advantages(self, rewards: Tensor) -> Tensor:
        return rewards


def test_a_plain_class_passes_and_a_missing_method_is_named() -> None:
    halves = Halves()
    assert as_advantage(halves) is halves
    with pytest.raises(ValueError, match="advantage: Nothing has no method 'compute', which"):
        as_advantage(Nothing())  # type: ignore[arg-type]


def test_estimates_by_hand() -> None:
    """Two steps: token 0 in step 0, tokens 1 and 2 in step 1. g = 1/2, l = 1/2.

    Rewards 0, 1, 3 and values 1, 2, 4: r* = (0, 2), V* = (1, 3).
    R*_1 = 2, A*_1 = 2 - 3 = -1. Last step: R = r = (1, 3), A = r - V = (1 - 2, 3 - 4).
    First: R = 0 + 2/2 = 1; A = 0 - 1 + 3/2 + (1/4)(-1) = 1/4.
    """
    estimates = StepGAE(gamma=0.5, lam=0.5).compute(
        torch.tensor([[0.0, 1.0, 3.0, 9.0]]),
        torch.tensor([[1.0, 2.0, 4.0, 9.0]]),
        torch.tensor([[4, 7, 7, 0]]),
        torch.tensor([[True, True, True, False]]),
    )
    torch.testing.assert_close(estimates.returns, torch.tensor([[1.0, 1.0, 3.0, 0.0]]))


def random_case(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 5, 9, generator=generator, dtype=torch.float64)
    steps = torch.randint(0, 4, (5, 9), generator=generator)
    members = torch.rand(5, 9, generator=generator) < 0.8
    members[3] = False
    return rewards, values, steps, members


def slow(
    rewards: list[float], values: list[float], steps: list[int], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """One row without left-out cells, by the definitions."""
    order = sorted(set(steps))

    def mean(numbers: list[float], step: int) -> float:
        found = [x for x, s in zip(numbers, steps, strict=True) if s == step]
        return sum(found) / len(found)

    later = {order[-1]: (0.0, 0.0, 0.0)}
    for this, following in zip(reversed(order[:-1]), reversed(order), strict=False):
        R, V, A = later[following]
        reward, value = mean(rewards, following), mean(values, following)
        later[this] = (reward + gamma * R, value, reward - value + gamma * V + gamma * lam * A)
    parts = [later[step] for step in steps]
    returns = [r + gamma * R for r, (R, _, _) in zip(rewards, parts, strict=True)]
    advantages = [
        r - v + gamma * V + gamma * lam * A
        for r, v, (_, V, A) in zip(rewards, values, parts, strict=True)
    ]
    return returns, advantages


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.7), (1.0, 0.0), (0.5, 1.0)])
def test_equals_a_slow_loop(gamma: float, lam: float) -> None:
    rewards, values, steps, members = random_case(3)
    found = StepGAE(gamma=gamma, lam=lam).compute(rewards, values, steps, members)
    for row in range(5):
        kept = members[row]
        if not kept.any():
            assert not found.returns[row].any()
            assert not found.advantages[row].any()
            continue
        returns, advantages = slow(
            rewards[row, kept].tolist(),
            values[row, kept].tolist(),
            steps[row, kept].tolist(),
            gamma,
            lam,
        )
        torch.testing.assert_close(found.returns[row, kept].tolist(), returns)
        torch.testing.assert_close(found.advantages[row, kept].tolist(), advantages)
        assert not found.returns[row, ~kept].any()


def test_outcome_reward_without_discount_gives_every_token_the_reward() -> None:
    """g = l = 1 and an outcome reward R: R_k = R and A_k = R - V_k for every token."""
    _, values, steps, members = random_case(5)
    totals = torch.randn(5, dtype=torch.float64)
    rewards = outcome_rewards(totals, steps, members)
    found = StepGAE().compute(rewards, values, steps, members)
    expected = torch.where(members, totals[:, None], 0.0)
    # Not in the last step, where a token keeps its own reward: the same number here.
    torch.testing.assert_close(found.returns, expected)
    torch.testing.assert_close(found.advantages, torch.where(members, expected - values, 0.0))
