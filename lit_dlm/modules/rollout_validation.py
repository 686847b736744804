"""Validation by rollouts: held-out prompts, the same decoder, the same rewards."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from lightning.pytorch.strategies import Strategy

from lit_dlm.modules.rollouts import RolloutEngine, RolloutPrompt
from lit_dlm.rewards.base import RewardScore, Rollout
from lit_dlm.rewards.rewarder import Rewarder


@dataclass
class ValidationBatch:
    """Held-out prompts; copies that only fill a batch are not counted."""

    prompts: list[RolloutPrompt]
    is_real: list[bool] = field(default_factory=list)


class RolloutValidation:
    """Decodes, scores and adds up.

    Args:
        engine: what decodes.
        rewarder: what scores.
    """

    def __init__(self, engine: RolloutEngine, rewarder: Rewarder) -> None:
        self.engine = engine
        self.rewarder = rewarder
        self.last: dict[str, float] = {}
        """Means of the last validation."""
        self.begin()

    def begin(self) -> None:
        """Starts over."""
        self._rows: list[list[float]] = []

    def add(self, batch: ValidationBatch) -> None:
        """Decodes and scores a batch.

        Args:
            batch: prompts of this process.
        """
        rollouts = self.engine.generate(batch.prompts)
        scores = self.rewarder.score([[rollout] for rollout in rollouts])
        for rollout, (score,), is_real in zip(rollouts, scores, batch.is_real, strict=True):
            if is_real:
                self._rows.append(_facts(rollout, score))

    def result(self, strategy: Strategy, device: torch.device) -> dict[str, float]:
        """Means over the prompts of all processes; every process must call it.

        Args:
            strategy: adds up over processes.
            device: of the tensors that travel.

        Returns:
            ``reward`` and ``reward_stderr`` (one standard error over prompts), ``accuracy``,
            ``response_length`` in tokens, ``num_steps`` and ``num_prompts``.
        """
        local = torch.zeros(len(_FACTS) + 2, dtype=torch.float64)
        for row in self._rows:
            local += torch.tensor([*row, row[0] ** 2, 1.0], dtype=torch.float64)
        # In float32 where the device has nothing better.
        local = local.to(torch.float32 if device.type == "mps" else torch.float64)
        total = strategy.reduce(local.to(device), reduce_op="sum").tolist()
        count = max(total[-1], 1.0)
        means = {name: value / count for name, value in zip(_FACTS, total[:-2], strict=True)}
        variance = max(total[-2] / count - means["reward"] ** 2, 0.0)
        means["reward_stderr"] = math.sqrt(variance / max(count - 1.0, 1.0))
        means["num_prompts"] = total[-1]
        self.last = means
        return means


_FACTS = ("reward", "accuracy", "response_length", "num_steps")


def _facts(rollout: Rollout, score: RewardScore) -> list[float]:
    record = rollout.trajectory
    return [
        float(score.total),
        float(score.is_correct),
        float(record.meta["num_tokens"]),
        float(record.num_steps),
    ]
