"""Validation by rollouts: held-out prompts, one or several decoders, the same rewards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from lightning.pytorch.strategies import Strategy

from lit_dlm.modules.rollouts import RolloutEngine, RolloutPrompt
from lit_dlm.rewards.base import Reward, RewardScore, Rollout
from lit_dlm.rewards.rewarder import Rewarder


@dataclass
class ValidationBatch:
    """Held-out prompts; copies that only fill a batch are not counted."""

    prompts: list[RolloutPrompt]
    is_real: list[bool] = field(default_factory=list)


def validation_rewards(rewards: Sequence[Reward]) -> list[Reward]:
    """The rewards of a run that say something about single responses.

    Args:
        rewards: those of training.

    Returns:
        All but those that come after the filters, which only see groups worth training on.

    Raises:
        ValueError: none is left.
    """
    found = [reward for reward in rewards if not reward.after_filters]
    if rewards and not found:
        raise ValueError(
            "val_tasks: validation takes the rewards that do not come after the filters, but "
            f"{', '.join(reward.name for reward in rewards)} does; add one to rewards, such as "
            "Graded with weight 0"
        )
    return found


class RolloutValidation:
    """Decodes, scores and adds up.

    Args:
        engines: what decodes, by decoder; prompts name theirs in ``meta``.
        rewarder: what scores.
    """

    def __init__(self, engines: Mapping[str, RolloutEngine], rewarder: Rewarder) -> None:
        self.engines = dict(engines)
        self.rewarder = rewarder
        self.last: dict[str, float] = {}
        """Means of the last validation."""
        self.begin()

    def begin(self) -> None:
        """Starts over."""
        self._rows: dict[str, list[list[float]]] = {method: [] for method in self.engines}

    def add(self, batch: ValidationBatch) -> None:
        """Decodes and scores a batch.

        Args:
            batch: prompts of this process.
        """
        for method, engine in self.engines.items():
            chosen = [
                (prompt, is_real)
                for prompt, is_real in zip(batch.prompts, batch.is_real, strict=True)
                if prompt.meta["method"] == method
            ]
            rollouts = engine.generate([prompt for prompt, _ in chosen])
            scores = self.rewarder.score([[rollout] for rollout in rollouts])
            for rollout, (score,), (_, is_real) in zip(rollouts, scores, chosen, strict=True):
                if is_real:
                    self._rows[method].append(_facts(rollout, score))

    def result(self, strategy: Strategy, device: torch.device) -> dict[str, float]:
        """Means over the prompts of all processes; every process must call it.

        Args:
            strategy: adds up over processes.
            device: of the tensors that travel.

        Returns:
            Of the first decoder ``reward`` and ``reward_stderr`` (one standard error over prompts),
            ``response_length`` in tokens, ``num_steps``, ``num_prompts``, and ``accuracy`` of what
            was graded, if anything was; of the others the same behind their name and a slash.
        """
        local = torch.zeros(len(self._rows), len(_FACTS) + 2, dtype=torch.float64)
        for number, rows in enumerate(self._rows.values()):
            for row in rows:
                local[number] += torch.tensor([*row, row[0] ** 2, 1.0], dtype=torch.float64)
        # In float32 where the device has nothing better.
        local = local.to(torch.float32 if device.type == "mps" else torch.float64)
        totals = strategy.reduce(local.to(device), reduce_op="sum").tolist()
        self.last = {}
        for number, (method, total) in enumerate(zip(self._rows, totals, strict=True)):
            prefix = f"{method}/" if number else ""
            self.last |= {f"{prefix}{name}": value for name, value in _means(total).items()}
        return self.last


_FACTS = ("reward", "response_length", "num_steps", "correct", "graded")


def _facts(rollout: Rollout, score: RewardScore) -> list[float]:
    record = rollout.trajectory
    return [
        float(score.total),
        float(record.meta["num_tokens"]),
        float(record.num_steps),
        float(score.is_correct),
        float(score.is_graded),
    ]


def _means(total: list[float]) -> dict[str, float]:
    count = max(total[-1], 1.0)
    means = {name: value / count for name, value in zip(_FACTS, total[:-2], strict=True)}
    variance = max(total[-2] / count - means["reward"] ** 2, 0.0)
    means["reward_stderr"] = math.sqrt(variance / max(count - 1.0, 1.0))
    means["num_prompts"] = total[-1]
    correct, graded = means.pop("correct"), means.pop("graded")
    if graded:
        means["accuracy"] = correct / graded
    return means
