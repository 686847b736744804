"""What an RL run logs: metrics of rollouts and of updates, and validation by rollouts."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lit_dlm.finetuning.trainable import TrainableModule
from lit_dlm.rewards.base import RewardScore, Rollout
from lit_dlm.rewards.rewarder import Rewarder
from lit_dlm.rewards.speed import ForwardPrice
from lit_dlm.rl.engine import Problem
from lit_dlm.rl.rollout import (
    DecodingEngine,
    ScoredRollout,
    encoded_problems,
    groups_of,
    rollout_prompts,
)
from lit_dlm.rl.settings import RolloutSettings
from lit_dlm.tasks import tasks_by_name
from lit_dlm.training.ranks import Ranks

_MEASURES = ("reward", "response_length", "num_steps", "correct", "graded")


class RolloutValidation:
    """Decodes held-out prompts on all processes, scores the responses and averages the scores.

    Scores of the first decoder get the plain names; with ``is_mean``, means over all of them do.
    """

    def __init__(
        self,
        engines: Mapping[str, DecodingEngine],
        rewarder: Rewarder,
        problems: Sequence[Problem],
        *,
        num_responses: int = 1,
        is_mean: bool = False,
    ) -> None:
        self.engines = dict(engines)
        self.rewarder, self.is_mean = rewarder, is_mean
        self.prompts = {
            method: rollout_prompts(
                problems,
                method=method,
                num_responses=num_responses,
                response_length=engine.response_length,
            )
            for method, engine in engines.items()
        }
        self.num_prompts = len(problems)
        self.last: dict[str, float] = {}  # means of the last validation
        self.begin()

    def begin(self) -> None:
        # Per decoder and prompt: sums of the measures over its responses, and their number. The
        # responses to one prompt may be on different processes.
        shape = (len(self.engines), self.num_prompts, len(_MEASURES) + 1)
        self._totals = torch.zeros(shape, dtype=torch.float64)

    def add(self, method: str) -> None:
        """Decodes this process's share of the held-out prompts, and scores the responses.

        Processes take prompts from one queue as rows of their batches end, so all must call it.
        """
        totals = self._totals[list(self.engines).index(method)]
        rollouts = self.engines[method].generate(self.prompts[method], shared=True)
        scores = self.rewarder.score([[rollout] for rollout in rollouts])
        for rollout, (score,) in zip(rollouts, scores, strict=True):
            totals[rollout.trajectory.meta["prompt"]] += _measured(rollout, score)

    def result(self, ranks: Ranks) -> dict[str, float]:
        """Returns means over the prompts of all processes; every process must call it.

        Responses to one prompt are averaged first. Scores of the first decoder have plain names,
        those of others begin with its name and a slash; a decoder without a response has none.
        """
        self.last = self._named(ranks.sum(self._totals))
        return self.last

    @property
    def names(self) -> list[str]:
        """Names of what :meth:`result` returns."""
        totals = torch.ones_like(self._totals)
        totals[..., _MEASURES.index("graded")] = float(self.rewarder.grades)
        return list(self._named(totals))

    def _named(self, totals: Tensor) -> dict[str, float]:
        found = _means(totals.sum(0)) if self.is_mean else {}
        for number, (method, total) in enumerate(zip(self.engines, totals, strict=True)):
            prefix = f"{method}/" if number or self.is_mean else ""
            found |= {f"{prefix}{name}": value for name, value in _means(total).items()}
        return found

    def close(self) -> None:
        self.rewarder.close()


def validation_of(
    module: TrainableModule, methods: Sequence[str], settings: RolloutSettings, *, is_mean: bool
) -> RolloutValidation:
    """Makes the validation of a run for some decoders, within the trainer's limit of batches."""
    tasks, response_length = settings.val_tasks or [], settings.val_response_length
    response_length = response_length or settings.response_length
    # Rewards after the filters see only groups worth training on, and nothing is filtered here.
    rewards = [reward for reward in settings.rewards if not reward.after_filters]
    # Where training changes a price, validations with that of the start can be compared.
    rewards = [copy.copy(one) if isinstance(one, ForwardPrice) else one for one in rewards]
    if settings.rewards and not rewards:
        raise ValueError(
            "val_tasks: validation takes the rewards that do not come after the filters, but "
            f"{', '.join(reward.name for reward in settings.rewards)} does; add one to rewards, "
            "such as Graded with weight 0"
        )
    problems = encoded_problems(
        module, tasks, max_length=settings.max_prompt_length, response_length=response_length
    )
    limit, size = module.trainer.limit_val_batches, settings.rollout_batch_size
    count = int(limit * len(problems))
    if isinstance(limit, int):
        count = math.ceil(limit * size * module.trainer.world_size / settings.val_responses)
    return RolloutValidation(
        {
            method: DecodingEngine(
                module,
                method=method,
                response_length=response_length,
                batch_size=size,
                overlong_margin=settings.overlong_margin,
            )
            for method in methods
        },
        Rewarder(
            rewards,
            tasks_by_name(tasks, option="val_tasks"),
            overlong_is_wrong=False,
            num_workers=settings.num_workers,
            require_isolation=settings.require_isolation,
        ),
        problems[: max(count, 1)],
        num_responses=settings.val_responses,
        is_mean=is_mean,
    )


def _measured(rollout: Rollout, score: RewardScore) -> Tensor:
    """Returns ``(len(_MEASURES) + 1,)`` float64: measures of a response, and 1 to count it."""
    record = rollout.trajectory
    lengths = (record.meta["num_tokens"], record.num_steps)
    measures = (score.total, *lengths, score.is_correct, score.is_graded)
    return torch.tensor([*map(float, measures), 1.0], dtype=torch.float64)


def _means(totals: Tensor) -> dict[str, float]:
    """Returns means over the prompts that have a response; empty if none has."""
    totals = totals[totals[:, -1] > 0]
    if not len(totals):
        return {}
    prompts = dict(zip(_MEASURES, (totals[:, :-1] / totals[:, -1:]).unbind(1), strict=True))
    correct, graded = prompts.pop("correct"), prompts.pop("graded")
    means = {name: float(values.mean()) for name, values in prompts.items()}
    if len(totals) > 1:
        means["reward_stderr"] = float(prompts["reward"].std()) / math.sqrt(len(totals))
    means["num_prompts"] = float(len(totals))
    is_graded = graded > 0
    if is_graded.any():
        means["accuracy"] = float((correct[is_graded] / graded[is_graded]).mean())
    return means


class UpdateScores(nn.Module):
    """Metrics over the updates of one RL step; their sums cover all processes.

    Losses are averaged over the rows of each update, then over updates. The children have the names
    under which they are logged.
    """

    def __init__(self, *, with_value: bool) -> None:
        super().__init__()
        self.loss, self.policy_loss = Quotient(), Quotient()
        if with_value:
            self.value_loss = Quotient()
            self.value_error, self.value_explained = ValueFit("error"), ValueFit("explained")


def rollout_metrics(rollouts: Sequence[ScoredRollout]) -> dict[str, float]:
    """Returns means over the rollouts of all processes, dropped groups included.

    ``correct`` is the share of right responses among those graded,
    ``reward_std`` the mean over groups of the deviation within each, ``garbled`` the share of texts
    that are not valid Unicode; lengths go up to the end of text.
    """
    groups = groups_of(rollouts)
    rewards = np.array([one.reward for one in rollouts], dtype=np.float64)
    lengths = np.array([one.num_tokens for one in rollouts], dtype=np.float64)
    steps = np.array([one.record.num_steps for one in rollouts], dtype=np.float64)
    grades = [one.correct for one in rollouts if one.correct is not None]
    parts: dict[str, list[float]] = {}
    for name, value in chain.from_iterable(one.parts.items() for one in rollouts):
        parts.setdefault(name, []).append(value)
    metrics = {
        "reward": rewards.mean(),
        "reward_std": np.mean([rewards[group].std() for group in groups]),
        "overlong": np.mean([one.overlong for one in rollouts]),
        "garbled": np.mean([one.garbled for one in rollouts]),
        "response_length": lengths.mean(),
        "num_steps": steps.mean(),
        "tokens_per_step": lengths.sum() / max(steps.sum(), 1.0),
        "groups": len(groups),
        "kept_groups": sum(rollouts[group[0]].kept for group in groups),
        **({"correct": np.mean(grades)} if grades else {}),
        **{f"reward/{name}": np.mean(parts[name]) for name in sorted(parts)},
    }
    return {f"rollout/{name}": float(value) for name, value in metrics.items()}


class Quotient(Metric):
    """One sum divided by another; 0 where the latter is 0."""

    full_state_update = False

    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sums", torch.zeros(2, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, numerator: Tensor, denominator: float) -> None:
        added = numerator.new_tensor([0.0, denominator], dtype=torch.float64)
        added[0] = numerator.detach()
        self.sums = self.sums + added  # not in place: stays float64 in a model of bfloat16

    def compute(self) -> Tensor:
        numerator, denominator = self.sums.unbind()
        return torch.where(denominator > 0, numerator / denominator, 0.0).float()


class ValueFit(Metric):
    """How well values fit returns, with equal weight on all tokens.

    ``error`` is the root of the mean squared error, ``explained`` the share of the returns'
    variance that the values explain (0 where the returns do not vary).
    """

    full_state_update = False

    sums: Tensor

    def __init__(self, score: Literal["error", "explained"]) -> None:
        super().__init__()
        self.score = score
        self.add_state("sums", torch.zeros(4, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Tensor, returns: Tensor, counted: Tensor) -> None:
        target = torch.where(counted, returns, 0.0).double()
        error = torch.where(counted, values.detach() - returns, 0.0).double()
        terms = (counted.double(), target, target**2, error**2)
        self.sums = self.sums + torch.stack([term.sum() for term in terms])

    def compute(self) -> Tensor:
        count, total, squares, errors = self.sums.unbind()
        count = count.clamp_min(1)
        if self.score == "error":
            return (errors / count).sqrt().float()
        variance = squares / count - (total / count) ** 2
        explained = 1.0 - errors / count / variance
        return torch.where(variance > 1e-6, explained, 0.0).float()
