"""Validation by rollouts: held-out prompts, one or several decoders, the same rewards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor

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
        num_prompts: held-out prompts of all processes; each one's ``place`` is in its ``meta``.
    """

    def __init__(
        self, engines: Mapping[str, RolloutEngine], rewarder: Rewarder, *, num_prompts: int
    ) -> None:
        self.engines = dict(engines)
        self.rewarder = rewarder
        self.num_prompts = num_prompts
        self.last: dict[str, float] = {}
        """Means of the last validation."""
        self.begin()

    def begin(self) -> None:
        """Starts over."""
        # By decoder and prompt, over its responses: sums of the facts and how many there are. The
        # responses to one prompt may lie on different processes.
        shape = (len(self.engines), self.num_prompts, len(_FACTS) + 1)
        self._totals = torch.zeros(shape, dtype=torch.float64)

    def add(self, batch: ValidationBatch) -> None:
        """Decodes and scores a batch.

        Args:
            batch: prompts of this process.
        """
        for totals, (method, engine) in zip(self._totals, self.engines.items(), strict=True):
            chosen = [
                (prompt, is_real)
                for prompt, is_real in zip(batch.prompts, batch.is_real, strict=True)
                if prompt.meta["method"] == method
            ]
            rollouts = engine.generate([prompt for prompt, _ in chosen])
            scores = self.rewarder.score([[rollout] for rollout in rollouts])
            for rollout, (score,), (prompt, is_real) in zip(rollouts, scores, chosen, strict=True):
                if is_real:
                    totals[prompt.meta["place"]] += _facts(rollout, score)

    def result(self, strategy: Strategy, device: torch.device) -> dict[str, float]:
        """Means over the prompts of all processes; every process must call it.

        Args:
            strategy: adds up over processes.
            device: of the tensors that travel.

        Returns:
            Of the first decoder ``reward`` and ``reward_stderr`` (one standard error over prompts,
            where there are several), ``response_length`` in tokens, ``num_steps``, ``num_prompts``,
            and ``accuracy`` of what was graded, if anything was; of the others the same behind
            their name and a slash. Responses to one prompt are averaged first. A decoder without a
            response, as when only some batches are validated, has none of it.
        """
        # In float32 where the device has nothing better.
        local = self._totals.to(torch.float32 if device.type == "mps" else torch.float64)
        totals = strategy.reduce(local.to(device), reduce_op="sum").cpu().double()
        self.last = {}
        for number, (method, total) in enumerate(zip(self.engines, totals, strict=True)):
            prefix = f"{method}/" if number else ""
            self.last |= {f"{prefix}{name}": value for name, value in _means(total).items()}
        return self.last


_FACTS = ("reward", "response_length", "num_steps", "correct", "graded")


def _facts(rollout: Rollout, score: RewardScore) -> Tensor:
    """``(len(_FACTS) + 1,)`` float64 facts of a response, and 1 for itself."""
    record = rollout.trajectory
    facts = (
        score.total,
        record.meta["num_tokens"],
        record.num_steps,
        score.is_correct,
        score.is_graded,
    )
    return torch.tensor([*map(float, facts), 1.0], dtype=torch.float64)


def _means(totals: Tensor) -> dict[str, float]:
    """Means over the prompts with a response; none without any."""
    totals = totals[totals[:, -1] > 0]
    if not len(totals):
        return {}
    prompts = dict(zip(_FACTS, (totals[:, :-1] / totals[:, -1:]).unbind(1), strict=True))
    correct, graded = prompts.pop("correct"), prompts.pop("graded")
    means = {name: float(values.mean()) for name, values in prompts.items()}
    if len(totals) > 1:
        means["reward_stderr"] = float(prompts["reward"].std()) / math.sqrt(len(totals))
    means["num_prompts"] = float(len(totals))
    is_graded = graded > 0
    if is_graded.any():
        means["accuracy"] = float((correct[is_graded] / graded[is_graded]).mean())
    return means
