"""One RL step, from prompts to the batches that the policy is updated on (arXiv:2509.06949).

:func:`rl_step` reads from top to bottom like the algorithm of the paper; the functions below it are
its parts in the same order, numbered as on the page about the architecture. It runs without
gradients in evaluation mode, before the first update (8).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from lit_dlm.rl.advantages import Advantage, StepGAE, outcome_rewards
from lit_dlm.rl.items import Items, RolloutBatch, RowBuilder, joined, order_of_writing
from lit_dlm.rl.metrics import rollout_metrics
from lit_dlm.rl.rollout import (
    Report,
    Rollouts,
    RolloutSource,
    ScoredRollout,
    groups_of,
    in_order,
)
from lit_dlm.rl.settings import PolicyObjective, RolloutSettings, ValueObjective
from lit_dlm.training.batch import SupervisedBatch
from lit_dlm.training.ranks import ALONE, Ranks
from lit_dlm.training.states import Masking
from lit_dlm.trajectories.record import SIGNAL_DTYPES

logger = logging.getLogger(__name__)

# Weight of the past in ``rollout/reward_smoothed``, which early stopping watches.
_SMOOTHING = 0.9


class ItemScores(NamedTuple):
    """What policy and value model return for a batch."""

    log_prob: Tensor  # (M,) of each unit
    entropy: Tensor  # (N,) of each scored position, nats
    value: Tensor | None  # (M,) of each token before it was written


class Policy(Protocol):
    """What an RL step needs of the model in training; ``TraceRLModule`` implements it."""

    method: str  # of the decoder that rolls out
    objective: PolicyObjective
    value: ValueObjective | None
    masking: Masking
    rows: RowBuilder

    @property
    def takes_token_rewards(self) -> bool: ...  # whether tokens have states of their own

    @property
    def device(self) -> torch.device: ...

    # (M,) each: scores with the current weights, values alone, scores under the initial policy.
    def score(self, batch: RolloutBatch) -> ItemScores: ...
    def values(self, batch: RolloutBatch) -> Tensor: ...
    def reference_log_prob(self, batch: RolloutBatch) -> Tensor: ...

    # Evaluation mode, under the trainer's precision.
    def evaluation(self) -> AbstractContextManager[None]: ...

    # Gather whole weights: of the decoding model, with its adapter merged, and of the value model.
    def rollout_weights(self) -> AbstractContextManager[None]: ...
    def value_weights(self) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, kw_only=True)
class RLProgress:
    """Progress of training between two RL steps, as checkpoints keep it."""

    step: int = 0  # number of the RL step to do next
    cursor: int = 0  # prompts drawn so far
    skipped: int = 0  # RL steps in which the filters dropped everything
    smoothed: float | None = None  # running mean of the reward


START = RLProgress()


class MicroBatch(NamedTuple):
    """Which items a batch holds."""

    items: Tensor  # (n,) int64
    factor: float  # of their weights; 0 for a copy that only fills a batch


@dataclass(frozen=True, kw_only=True)
class RLStep:
    """What one RL step trains on."""

    number: int
    rollouts: list[ScoredRollout]  # of all processes, in order, dropped groups included
    items: Items
    batches: list[MicroBatch]  # of this process
    num_slots: int  # items of a full batch
    is_empty: bool  # the filters dropped everything; then the only batch has no weight
    metrics: dict[str, float]  # what is logged
    progress: RLProgress  # after this RL step

    def batch(self, number: int) -> RolloutBatch:
        items, factor = self.batches[number]
        return self.items.batch(
            items, factor=factor, num_slots=self.num_slots, is_empty=self.is_empty
        )


@torch.no_grad()
def rl_step(
    policy: Policy,
    source: RolloutSource,
    settings: RolloutSettings,
    progress: RLProgress,
    *,
    accumulate: int = 1,
    version: int = 0,
    ranks: Ranks = ALONE,
    report: Report = lambda *_: None,
) -> RLStep:
    """Does everything in an RL step that comes before the updates; every process must call it.

    Args:
        policy: policy and value model, in evaluation mode.
        source: decodes prompts and scores the responses, or reads those of a former run.
        settings: advantage, items of a batch, passes over them, and seed.
        progress: how far training is.
        accumulate: batches per update.
        version: optimiser steps that the policy has taken.
        ranks: the processes.
        report: called with the progress of each phase.
    """
    # 1 to 3. Roll out: decode the prompts with the current policy, score the responses, and mark
    # the groups that the filters keep. All processes get all rollouts.
    with policy.rollout_weights():
        rollouts = source.collect(
            progress.step, progress.cursor, version=version, ranks=ranks, report=report
        )
    times, begin = rollouts.times, time.perf_counter()

    # 4. Items: the states that each kept response went through in its decode (or others, depending
    # on the masking), drawn anew in each pass.
    trained, passes = rollouts.kept, range(settings.passes)
    records = [one.record for one in trained]
    by_pass = [policy.rows.items(records, epoch=number) for number in passes if records]
    is_empty = not any(map(len, by_pass))
    if is_empty:
        # Every process must still run a forward and a backward, or the others would wait for it, so
        # take the dropped responses and give them no weight.
        trained = rollouts.scored
        by_pass = [policy.rows.items([one.record for one in trained])]
    items = joined(by_pass)
    if not len(items):
        raise ValueError(
            f"RL step {progress.step}: no response has a token to train on; look at the decoder "
            f"'{policy.method}'"
        )

    # 5. Returns and advantages: rewards are compared within a group and, with a value model or
    # rewards per token, propagated back along the steps of the decode.
    assert settings.advantage is not None
    estimates = fill_advantages(
        policy,
        items,
        trained,
        advantage=settings.advantage,
        batch_size=settings.batch_size,
        ranks=ranks,
    )
    times["value"] = time.perf_counter() - begin

    # 6. Batches: shuffled, equally many on every process.
    begin = time.perf_counter()
    batches = shard_items(
        *(part.size.numpy() for part in by_pass),
        batch_size=settings.batch_size,
        accumulate=accumulate,
        rank=ranks.rank,
        world_size=ranks.world_size,
        seed=(settings.seed, progress.step),
    )
    if is_empty:
        batches = [MicroBatch(torch.tensor([0]), 0.0)]

    # 7. Old and reference log-probabilities and old values, before the first update changes the
    # weights.
    differences = fill_old_scores(policy, batches, items, report=report)
    times["old_log_prob"] = time.perf_counter() - begin

    # 9. What is logged and stored: dropped rollouts count as well, with a reward and no advantage.
    dropped = [] if is_empty else [one for one in rollouts.scored if not one.kept]
    noted = in_order(estimates.with_signals([*trained, *dropped]))
    metrics = rollout_metrics(noted) | estimates.metrics() | _mismatch(differences, ranks)
    after = _after(progress, rollouts, reward=metrics["rollout/reward"], is_empty=is_empty)
    metrics |= {
        "rollout/reward_smoothed": after.smoothed or 0.0,
        "rollout/skipped_steps": float(after.skipped),
        "rollout/items": float(0 if is_empty else len(items)),
        **{f"time/{name}": value for name, value in times.items()},
    }
    return RLStep(
        number=progress.step,
        rollouts=noted,
        items=items,
        batches=batches,
        num_slots=settings.batch_size,
        is_empty=is_empty,
        metrics=metrics,
        progress=after,
    )


def _after(
    progress: RLProgress, rollouts: Rollouts, *, reward: float, is_empty: bool
) -> RLProgress:
    if is_empty:
        logger.warning(
            "RL step %d: the filters dropped all %d groups, nothing is learnt in this step",
            progress.step,
            rollouts.num_prompts,
        )
    past = reward if progress.smoothed is None else progress.smoothed
    return RLProgress(
        step=progress.step + 1,
        cursor=progress.cursor + rollouts.num_prompts,
        skipped=progress.skipped + is_empty,
        smoothed=_SMOOTHING * past + (1.0 - _SMOOTHING) * reward,
    )


# -- 5. returns and advantages ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """Per-token advantages and values of an RL step; ``(num_records, G)`` each."""

    advantages: Tensor  # float32
    members: Tensor  # bool, the tokens that have them
    returns: Tensor | None = None  # float32, what the values are trained towards
    values: Tensor | None = None  # float32, before each token was written; with a value model

    def metrics(self) -> dict[str, float]:
        """Returns what is logged of the values; empty without a value model."""
        if self.values is None:
            return {}
        mean = (self.values * self.members).sum() / self.members.sum().clamp_min(1)
        return {"rollout/value_mean": float(mean)}

    def with_signals(self, rollouts: Sequence[ScoredRollout]) -> list[ScoredRollout]:
        """Gives the records the signals ``commit_advantage`` and ``commit_value``.

        NaN where a token has none, as in all rollouts after those that are trained on.
        """
        tables = {"commit_advantage": self.advantages, "commit_value": self.values}
        found = []
        for number, rollout in enumerate(rollouts):
            record, signals = rollout.record, dict(rollout.record.signals)
            for name, table in tables.items():
                if table is None:
                    continue
                row = np.full(record.num_generated, np.nan, dtype=SIGNAL_DTYPES[name])
                if number < len(table):
                    known = torch.where(self.members[number], table[number], torch.nan)
                    row[:] = known[: record.num_generated].numpy()
                signals[name] = row
            found.append(replace(rollout, record=replace(record, signals=signals)))
        return found


def _compared(rollouts: Sequence[ScoredRollout], advantage: Advantage) -> Tensor:
    """Returns ``(num_rollouts,)`` float32: what each response is worth among its group's."""
    rewards = torch.tensor([one.reward for one in rollouts], dtype=torch.float32)
    compared = torch.zeros_like(rewards)
    for group in groups_of(rollouts):
        found = advantage.compute(rewards[group])
        if found.shape != rewards[group].shape or not bool(found.isfinite().all()):
            raise ValueError(
                f"advantage: {type(advantage).__name__} must give {len(group)} finite numbers for "
                f"as many rewards, got {found.tolist()}"
            )
        compared[group] = found
    return compared


def fill_advantages(
    policy: Policy,
    items: Items,
    rollouts: Sequence[ScoredRollout],
    *,
    advantage: Advantage,
    batch_size: int,
    ranks: Ranks = ALONE,
) -> Estimates:
    """Fills in the advantage of every unit and, with a value model, its return.

    ``rollouts`` are those that the items were made from. Processes share the forwards of a value
    model, each of ``batch_size`` items.
    """
    compared = _compared(rollouts, advantage)
    responses = policy.rows.responses([one.record for one in rollouts])
    paid = [one.record.uid for one in rollouts if one.token_rewards is not None]
    if paid and not policy.takes_token_rewards:
        raise ValueError(
            f"{paid[0]}: expected rewards of responses, got rewards per token, but neither "
            "BoundViews nor commits have states of single tokens"
        )
    if policy.value is None and not paid:
        table = compared[:, None].expand_as(responses.maskable)
        estimates = Estimates(advantages=table.clone(), members=responses.maskable)
    else:
        values = None
        if policy.value is not None:
            # A process values its share of the records and leaves the others 0, so the sum over
            # processes is the whole table.
            values = ranks.sum(_values(policy, items, batch_size, ranks))
        estimates = _along_steps(policy, items, rollouts, responses, compared, values)
    items.advantage = estimates.advantages[items.record, items.cell]
    if estimates.values is not None and estimates.returns is not None:
        items.returns = estimates.returns[items.record, items.cell]
    return estimates


def _along_steps(
    policy: Policy,
    items: Items,
    rollouts: Sequence[ScoredRollout],
    responses: SupervisedBatch,
    compared: Tensor,
    values: Tensor | None,
) -> Estimates:
    """Propagates rewards back along the steps; without values, as undiscounted rewards-to-go."""
    value, shrink, gae = policy.value, 1, StepGAE()
    if value is not None:
        shrink, gae = value.trace(policy.masking).shrink, StepGAE(value.gamma, value.lam)
    # A response's advantage is paid at its last step, rewards per token at their tokens. So one
    # recursion carries both back, and a token also answers for what later steps were paid.
    steps, members = order_of_writing(responses, shrink=shrink)
    rewards = outcome_rewards(compared, steps, members)
    for number, rollout in enumerate(rollouts):
        if rollout.token_rewards is not None:
            paid = torch.tensor(rollout.token_rewards, dtype=torch.float32)
            rewards[number, : len(paid)] += paid * members[number, : len(paid)]
    known = torch.zeros_like(rewards) if values is None else values
    returns, advantages = gae.compute(rewards, known, steps, members)
    if value is not None and not value.needs_whole_trace(policy.masking):
        # Only the items' own states have values; the others would be logged as 0.
        members = torch.zeros_like(members)
        members[items.record, items.cell] = True
    return Estimates(advantages=advantages, returns=returns, values=values, members=members)


@torch.no_grad()
def _values(policy: Policy, items: Items, batch_size: int, ranks: Ranks) -> Tensor:
    """Returns ``(num_records, G)`` token values of this process's share of the records, else 0."""
    assert policy.value is not None
    records = items.records
    found = torch.zeros(len(records), items.hidden.shape[1], dtype=torch.float32)
    mine = torch.arange(ranks.rank, len(records), ranks.world_size)
    numbers = torch.isin(items.item_record, mine).nonzero()[:, 0]
    if policy.value.needs_whole_trace(policy.masking) and len(mine):
        # Values are those of the states that the decode went through, whatever is trained on: the
        # advantage of a step needs the value of the next one, which random states do not have.
        rows = RowBuilder(
            policy.value.trace(policy.masking),
            policy.rows.spec,
            num_padding=policy.rows.num_padding,
            copies=policy.rows.copies,
        )
        items = rows.items([records[number] for number in mine.tolist()])
        items.record = mine[items.record]
        items.records = records
        numbers = torch.arange(len(items))
    # Entered by all processes, even one with nothing to value, since weights are gathered.
    with policy.value_weights():
        for chosen in numbers.split(batch_size) if len(numbers) else ():
            units = items.units(chosen)
            values = policy.values(items.batch(chosen).to(policy.device)).float().cpu()
            found[items.record[units], items.cell[units]] = values
    return found


# -- 6. batches ------------------------------------------------------------------------------------


def shard_items(
    *sizes: np.ndarray,
    batch_size: int,
    accumulate: int = 1,
    rank: int = 0,
    world_size: int = 1,
    seed: tuple[int, ...] = (0,),
) -> list[MicroBatch]:
    """Shards shuffled items into batches, equally many on every process.

    Every pass is shuffled and split on its own: no update mixes two passes. Its items are spread
    evenly over as few updates as can hold them, at most ``batch_size * accumulate * world_size``
    each. Items of smaller updates weigh more, so that every update is the mean over the rows of its
    own items; a batch that gets no item holds a copy of one with weight 0.

    ``sizes`` are, for each pass, the rows that each item counts for (:attr:`Items.size`); the items
    of a pass are numbered after those of the passes before it.
    """
    # All processes draw the same order and take their part of it, so none has to be told.
    generator = np.random.default_rng(list(seed))
    slots = batch_size * accumulate * world_size
    updates: list[np.ndarray] = []
    first = 0
    for count in filter(None, map(len, sizes)):
        order = first + generator.permutation(count)
        # Even parts: the rest of a division by ``slots`` could be a single row, whose update would
        # have the size of all others.
        updates += np.array_split(order, -(-count // slots))
        first += count
    weight = np.concatenate(sizes)
    batches: list[MicroBatch] = []
    for at, chosen in enumerate(updates):
        # The trainer counts batches, so only the last update may have fewer.
        is_last = at == len(updates) - 1
        needed = -(-len(chosen) // (batch_size * world_size)) if is_last else accumulate
        count = needed * world_size
        # The trainer divides by ``accumulate`` even then, and a loss by the items of a full batch.
        factor = slots / float(weight[chosen].sum())
        # The n-th batches of all processes are adjacent, so that one process with twice the
        # accumulation trains on the same items as two.
        for number in range(rank, count, world_size):
            items = torch.from_numpy(chosen[number::count])
            if len(items):
                batches.append(MicroBatch(items, factor))
            else:
                batches.append(MicroBatch(torch.from_numpy(chosen[:1]), 0.0))
    return batches


# -- 7. old scores ---------------------------------------------------------------------------------


@torch.no_grad()
def fill_old_scores(
    policy: Policy, batches: Sequence[MicroBatch], items: Items, *, report: Report = lambda *_: None
) -> Tensor:
    """Scores the batches of this process before the first update.

    The batches are those of training, so that the first ratio is exactly 1. Returns ``(3,)``
    float64 sums over this process's tokens: absolute and signed difference of log-probabilities
    (sampler less training forward, the estimated divergence), and tokens compared.
    """
    sampled = items.sampled_log_prob()
    M = len(items.weight)
    is_scored = torch.zeros(M, dtype=torch.bool)
    tables: dict[str, Tensor] = {}
    sums = torch.zeros(3, dtype=torch.float64)
    for done, (numbers, factor) in enumerate(batches):
        batch = items.batch(numbers).to(policy.device)
        scores = policy.score(batch)
        units, log_prob = items.units(numbers), scores.log_prob.cpu()
        if factor:
            difference = (sampled[units] - log_prob).double()
            difference = difference[difference.isfinite()]
            counted = difference.new_tensor(len(difference))
            sums += torch.stack([difference.abs().sum(), difference.sum(), counted])
        # A copy that only fills a batch may be rounded differently from the batch that is trained
        # on, whose scores are the ones to compare with: batches with weight overwrite, copies not.
        is_new = torch.ones_like(is_scored[units]) if factor else ~is_scored[units]
        found = {"old_log_prob": log_prob}
        if scores.value is not None:
            found["old_value"] = scores.value.cpu()
        if policy.objective.kl_to == "initial":
            found["reference"] = policy.reference_log_prob(batch).cpu()
        for name, value in found.items():
            table = tables.setdefault(name, value.new_zeros(M))
            table[units[is_new]] = value[is_new]
        is_scored[units] |= factor > 0
        report("old log-probabilities", done + 1, len(batches))
    for name, table in tables.items():
        setattr(items, name, table)
    return sums


def _mismatch(sums: Tensor, ranks: Ranks) -> dict[str, float]:
    """Returns mean differences of sampler and training forward over all processes."""
    mismatch, signed, count = ranks.sum(sums.float()).tolist()
    if not count:
        return {}
    return {"rollout/mismatch": mismatch / count, "rollout/mismatch_signed": signed / count}
