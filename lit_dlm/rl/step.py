"""One RL step, from prompts to the batches that the policy is updated on (arXiv:2509.06949).

:func:`rl_step` reads from top to bottom like the algorithm of the paper; the functions below it are
its parts in the same order. It runs without gradients in evaluation mode, before the first update.
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
from numpy.typing import NDArray
from torch import Tensor

from lit_dlm.backbones import BackboneSpec
from lit_dlm.losses.states import Corruption
from lit_dlm.ops.batches import split_batches, token_batches
from lit_dlm.rl.advantages import Advantage, StepGAE, outcome_rewards
from lit_dlm.rl.items import (
    RolloutBatch,
    RolloutItem,
    RowBuilder,
    collate_items,
    item_tokens,
    order_of_writing,
    pick,
)
from lit_dlm.rl.metrics import rollout_facts
from lit_dlm.rl.ranks import ALONE, Ranks
from lit_dlm.rl.rollout import SAMPLED, Report, RolloutSource, groups_of, in_order, no_report
from lit_dlm.rl.settings import PolicyObjective, ValueObjective
from lit_dlm.trajectories.record import SIGNAL_DTYPES, Trajectory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Slot:
    """One place of a batch."""

    item: int
    """Number of the item."""
    factor: float
    """On its weights: 0 on a copy that only fills a batch."""


class ItemScores(NamedTuple):
    """What the models say of a batch."""

    log_prob: Tensor
    """``(M,)`` log-probability of each unit's token."""
    entropy: Tensor
    """``(N,)`` entropy of each scored cell, nats."""
    value: Tensor | None
    """``(M,)`` value of each token before it was written."""


class Policy(Protocol):
    """What an RL step asks of the model in training; ``TraceRLModule`` is one."""

    method: str
    """Name of the decoder that rolls out."""
    objective: PolicyObjective
    """Which log-probabilities are compared."""
    value: ValueObjective | None
    """Settings of the value model; ``None`` without one."""
    corruption: Corruption
    """The states that are trained on."""
    rows: RowBuilder
    """Turns records into training items."""
    row_spec: BackboneSpec
    """Specification of training rows."""
    num_padding: int | None
    """Cells of fill behind an answer that are trained; ``None`` for all."""

    @property
    def device(self) -> torch.device:
        """Where batches must lie to be scored."""
        ...

    def score(self, batch: RolloutBatch, *, with_value: bool | None = None) -> ItemScores:
        """Log-probabilities, entropies and values of a batch with the current weights."""
        ...

    def values(self, batch: RolloutBatch) -> Tensor:
        """Values ``(M,)`` of a batch's tokens."""
        ...

    def reference_log_prob(self, batch: RolloutBatch) -> Tensor:
        """Log-probabilities ``(M,)`` under the initial policy."""
        ...

    def rollout_weights(self) -> AbstractContextManager[None]:
        """Holds the weights as decoding wants them: whole, with the adapter folded in."""
        ...

    def value_weights(self) -> AbstractContextManager[None]:
        """Holds the value model's weights whole, for numbers of states that differ by process."""
        ...


@dataclass(frozen=True, kw_only=True)
class RLProgress:
    """Where training stands between two RL steps; what a checkpoint keeps."""

    step: int = 0
    """Number of the RL step to do next."""
    cursor: int = 0
    """Prompts drawn so far."""
    skipped: int = 0
    """RL steps in which the filters dropped everything."""
    smoothed: float | None = None
    """Running mean of the reward."""


@dataclass(frozen=True, kw_only=True)
class RLStep:
    """What one RL step trains on."""

    records: list[Trajectory]
    """Rollouts of all processes, those of dropped groups too, by prompt and response."""
    kept: Sequence[Trajectory]
    """The rollouts that items number."""
    items: Sequence[RolloutItem]
    """States with their advantages and old log-probabilities."""
    batches: list[list[Slot]]
    """Which items each batch of this process holds."""
    num_slots: int
    """Items of a full batch."""
    accumulate: int
    """Batches per update."""
    row_spec: BackboneSpec
    """Specification of training rows."""
    is_empty: bool
    """Whether the filters dropped everything; then the only batch has no weight."""
    facts: dict[str, float]
    """What is logged of the RL step."""
    progress: RLProgress
    """Where training stands after it."""

    def batch(self, number: int) -> RolloutBatch:
        """Collates one batch, on the CPU.

        Args:
            number: of the batch.
        """
        return collate_items(
            [(self.items[slot.item], slot.factor) for slot in self.batches[number]],
            self.kept,
            self.row_spec,
            num_slots=self.num_slots,
            is_empty=self.is_empty,
        )


@torch.no_grad()
def rl_step(
    policy: Policy,
    source: RolloutSource,
    advantage: Advantage,
    progress: RLProgress,
    *,
    batch_size: int,
    accumulate: int = 1,
    max_tokens: int | None = None,
    passes: int = 1,
    smoothing: float = 0.9,
    seed: int = 0,
    version: int = 0,
    ranks: Ranks = ALONE,
    report: Report = no_report,
) -> RLStep:
    """Does everything of an RL step that comes before its updates; every process must call it.

    Args:
        policy: policy and value model, in evaluation mode.
        source: decodes prompts and scores the responses, or reads those of a former run.
        advantage: compares the rewards of a prompt's responses.
        progress: where training stands.
        batch_size: items per batch and process.
        accumulate: batches per update.
        max_tokens: most tokens of a batch, padding included; updates have the same items, but as
            many batches as these need.
        passes: passes over the items, each in updates of its own.
        smoothing: weight of the past in ``rollout/reward_smoothed``.
        seed: seed of the order of items.
        version: optimiser steps that the policy has taken.
        ranks: the processes.
        report: told how far it is.

    Returns:
        The batches of this process, all rollouts, and what is logged.
    """
    # Roll out: decode the prompts with the current policy, score the responses, and mark the groups
    # that the filters keep. All processes get all rollouts.
    with policy.rollout_weights():
        rollouts = source.collect(
            progress.step, progress.cursor, version=version, ranks=ranks, report=report
        )
    seconds = rollouts.seconds

    # Items: the states that each kept response went through on its way (or other states of it, as
    # the corruption says), drawn anew in each pass.
    begin = time.perf_counter()
    kept = rollouts.kept
    items_by_pass = [policy.rows.items(kept, epoch=number) for number in range(passes)]
    is_empty = not any(items_by_pass)
    if is_empty:
        # Every process must run a forward and a backward all the same, so take the dropped
        # responses and give them no weight.
        kept, items_by_pass = rollouts.records, [policy.rows.items(rollouts.records)]
    items = [item for part in items_by_pass for item in part]
    if not items:
        raise ValueError(
            f"RL step {progress.step}: no response has a token to train on; look at the decoder "
            f"'{policy.method}'"
        )

    # Returns and advantages: rewards are compared within a group and, with a value model or rewards
    # per token, followed back along the steps of the decode.
    estimates = fill_advantages(
        policy, items, kept, advantage=advantage, batch_size=batch_size, ranks=ranks
    )
    seconds["value"] = time.perf_counter() - begin

    # Batches: shuffled, equally many on every process.
    begin = time.perf_counter()
    batches, accumulate = shard_items(
        *([item.size for item in part] for part in items_by_pass),
        batch_size=batch_size,
        accumulate=accumulate,
        lengths=np.array([item_tokens(item, kept, policy.row_spec) for item in items]),
        max_tokens=max_tokens,
        rank=ranks.rank,
        world_size=ranks.world_size,
        seed=(seed, progress.step),
    )
    if is_empty:
        batches = [[Slot(0, 0.0)]]

    # Old and reference log-probabilities and old values, in the very batches that are trained on,
    # so that the first ratio is 1 to the last bit.
    differences = fill_old_scores(policy, batches, items, kept, report=report)
    seconds["old_log_prob"] = time.perf_counter() - begin

    # What is logged and stored: dropped rollouts count as well, with a reward and no advantage.
    dropped = [] if is_empty else [one for one in rollouts.records if not one.meta["kept"]]
    records = in_order(estimates.with_signals([*kept, *dropped]))
    facts = rollout_facts(records) | _mismatch(differences, ranks)
    if policy.value is not None:
        facts["rollout/value_mean"] = estimates.value_mean
    reward = facts["rollout/reward"]
    past = reward if progress.smoothed is None else progress.smoothed
    smoothed = smoothing * past + (1.0 - smoothing) * reward
    after = RLProgress(
        step=progress.step + 1,
        cursor=progress.cursor + rollouts.num_drawn,
        skipped=progress.skipped + is_empty,
        smoothed=smoothed,
    )
    facts |= {
        "rollout/reward_smoothed": smoothed,
        "rollout/skipped_steps": float(after.skipped),
        "rollout/items": float(0 if is_empty else len(items)),
        **{f"time/{name}": value for name, value in seconds.items()},
        **{
            f"time/{name}": value
            for name in ("occupancy", "tokens_per_second")
            if (value := getattr(rollouts, name)) is not None
        },
    }
    if is_empty:
        logger.warning(
            "RL step %d: the filters dropped all %d groups, nothing is learnt in this step",
            progress.step,
            rollouts.num_drawn,
        )
    return RLStep(
        records=records,
        kept=kept,
        items=items,
        batches=batches,
        num_slots=batch_size,
        accumulate=accumulate,
        row_spec=policy.row_spec,
        is_empty=is_empty,
        facts=facts,
        progress=after,
    )


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """Per-token advantages and values of this RL step."""

    advantages: Tensor
    """``(num_records, G)`` float32 advantage of each token."""
    values: Tensor | None = None
    """``(num_records, G)`` float32 value of each token before it was written."""
    members: Tensor
    """``(num_records, G)`` bool, the tokens that have them."""

    @property
    def value_mean(self) -> float:
        """Mean value of the tokens; NaN without a value model."""
        if self.values is None:
            return float("nan")
        return float((self.values * self.members).sum() / self.members.sum().clamp_min(1))

    def with_signals(self, records: Sequence[Trajectory]) -> list[Trajectory]:
        """The records with their rows as signals, for shards and the viewer.

        Args:
            records: those the estimates are of, behind them those that are not trained on.

        Returns:
            Copies with the signals ``commit_advantage``, and ``commit_value`` where there is a
            value model; NaN where a token has none.
        """
        tables = {"commit_advantage": self.advantages, "commit_value": self.values}
        known = {
            name: torch.where(self.members, table, torch.nan).numpy()
            for name, table in tables.items()
            if table is not None
        }
        found = []
        for number, record in enumerate(records):
            signals = dict(record.signals)
            for name, table in known.items():
                row = np.full(record.num_generated, np.nan, dtype=SIGNAL_DTYPES[name])
                if number < len(table):
                    row[:] = table[number, : record.num_generated]
                signals[name] = row
            found.append(replace(record, signals=signals))
        return found


def fill_advantages(
    policy: Policy,
    items: Sequence[RolloutItem],
    records: Sequence[Trajectory],
    *,
    advantage: Advantage,
    batch_size: int,
    ranks: Ranks = ALONE,
) -> Estimates:
    """Gives every unit of every item its advantage, and with a value model its return and value.

    Values are those of the states that the decode went through, whatever states the items have;
    where that suffices, only those of the items (:meth:`ValueObjective.needs_whole_trace`). Every
    process evaluates its share of the records.

    Args:
        policy: policy and value model.
        items: what is trained on.
        records: rollouts of one RL step, in order; their meta holds the rewards.
        advantage: compares the rewards of a group.
        batch_size: states per forward of the value model.
        ranks: the processes, which share the forwards of the value model.

    Returns:
        Advantages and values of all tokens.
    """
    rewards = torch.tensor(
        [float(record.meta["reward"]) for record in records], dtype=torch.float32
    )
    compared = torch.zeros_like(rewards)
    for group in groups_of(records):
        compared[group] = _compared(advantage, rewards[group])
    G = max(record.num_generated for record in records)
    value = policy.value
    has_token_rewards = any("token_rewards" in record.meta for record in records)
    shrink = 1 if value is None else value.trace(policy.corruption).shrink
    _, responses = policy.rows.batch_of(records)
    if value is None and not has_token_rewards:
        for item in items:
            item.advantage = compared[item.record].expand(item.num_units).clone()
        return Estimates(
            advantages=compared[:, None].expand(-1, G).clone(), members=responses.maskable
        )
    # A response's advantage is paid when its last step is done, rewards per token where they lie.
    steps, members = order_of_writing(responses, shrink=shrink)
    token_rewards = outcome_rewards(compared, steps, members)
    for number, record in enumerate(records):
        given = record.meta.get("token_rewards")
        if given is not None:
            token_rewards[number, : len(given)] += (
                torch.tensor(given, dtype=torch.float32) * members[number, : len(given)]
            )
    values = torch.zeros(len(records), G, dtype=torch.float32)
    known = members
    if value is not None:
        mine = range(ranks.rank, len(records), ranks.world_size)
        if value.needs_whole_trace(policy.corruption):
            states = _trace_items(policy, records, mine)
        else:
            states = [item for item in items if item.record in mine]
            known = _cells_of(items, members)
        with policy.value_weights():
            values = _values(policy, states, records, G, batch_size)
        values = ranks.sum(values)
    # Without a value model: rewards to go, undiscounted.
    estimator = StepGAE() if value is None else value.estimator
    estimates = estimator.compute(token_rewards, values, steps, members)
    for item in items:
        item.advantage = pick(estimates.advantages, item)
        if value is not None:
            item.returns = pick(estimates.returns, item)
    return Estimates(
        advantages=estimates.advantages,
        values=None if value is None else values,
        members=known,
    )


def _compared(advantage: Advantage, rewards: Tensor) -> Tensor:
    found = advantage.compute(rewards)
    if found.shape != rewards.shape or not bool(found.isfinite().all()):
        raise ValueError(
            f"advantage: {type(advantage).__name__} must give {len(rewards)} finite numbers for "
            f"as many rewards, got {found.tolist()}"
        )
    return found


def _cells_of(items: Sequence[RolloutItem], members: Tensor) -> Tensor:
    """``(num_records, G)`` bool, the cells that some item scores."""
    found = torch.zeros_like(members)
    for item in items:
        found[item.record, item.cells] = True
    return found


def _trace_items(policy: Policy, records: Sequence[Trajectory], mine: range) -> list[RolloutItem]:
    """The states of every step of some records."""
    assert policy.value is not None
    builder = RowBuilder(
        policy.value.trace(policy.corruption),
        policy.row_spec,
        num_padding=policy.num_padding,
        copies=policy.rows.copies,
    )
    items = builder.items([records[number] for number in mine])
    for item in items:
        item.record = mine[item.record]
    return items


@torch.no_grad()
def _values(
    policy: Policy,
    items: Sequence[RolloutItem],
    records: Sequence[Trajectory],
    length: int,
    batch_size: int,
) -> Tensor:
    """``(num_records, G)`` values of the items' tokens before they were written, else 0."""
    values = torch.zeros(len(records), length, dtype=torch.float32)
    for first in range(0, len(items), batch_size):
        chosen = items[first : first + batch_size]
        batch = collate_items([(item, 1.0) for item in chosen], records, policy.row_spec)
        found = policy.values(batch.to(policy.device)).float().cpu()
        parts = found.split([item.num_units for item in chosen])
        for item, part in zip(chosen, parts, strict=True):
            values[item.record, item.cells] = part
    return values


def shard_items(
    *sizes: Sequence[float],
    batch_size: int,
    accumulate: int = 1,
    lengths: NDArray[np.integer] | None = None,
    max_tokens: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    seed: tuple[int, ...] = (0,),
) -> tuple[list[list[Slot]], int]:
    """Shards shuffled items into equal-sized batches per rank.

    Every pass is shuffled and split on its own: no update mixes two passes. Its items are spread
    evenly over as few updates as have room for them, each of at most ``batch_size * accumulate *
    world_size``. Items of smaller updates weigh more, so that every update is the mean over the
    rows that its own stand for; batches and processes that get none hold a copy of weight 0.

    Args:
        sizes: rows that each item of each pass over the RL step stands for
            (:attr:`RolloutItem.size`); the items of a pass are numbered behind those of the passes
            before it.
        batch_size: items per batch and process, however many rows they are.
        accumulate: batches per update.
        lengths: ``(number of items, 2)`` tokens of each item, needed with ``max_tokens``.
        max_tokens: most tokens of a batch, padding included: the items of an update are dealt to
            batches of similar lengths instead, as many in every update as one of them needs.
        rank: global rank.
        world_size: number of processes.
        seed: what the shuffles follow from, the same on all processes.

    Returns:
        The batches of this process, in order, and how many make an update; without ``max_tokens``
        the last one has those it needs.
    """
    generator = np.random.default_rng(list(seed))
    per_update = batch_size * accumulate * world_size
    updates: list[np.ndarray] = []
    weight = np.array([size for part in sizes for size in part])
    first = 0
    for count in filter(None, map(len, sizes)):
        order = first + generator.permutation(count)
        updates += np.array_split(order, -(-count // per_update))
        first += count
    # Items of the batches of each update, of all processes in turn.
    parts: list[list[np.ndarray]] = []
    if max_tokens is None:
        for at, chosen in enumerate(updates):
            # The trainer counts batches, so only the last update may have fewer.
            is_last = at == len(updates) - 1
            needed = -(-len(chosen) // (batch_size * world_size)) if is_last else accumulate
            # Batch n of all processes lie next to each other, so that one process with twice the
            # accumulation trains on the same.
            count = needed * world_size
            parts.append([chosen[number::count] for number in range(count)])
    else:
        assert lengths is not None
        for chosen in updates:
            fitting = token_batches(lengths[chosen], max_tokens)
            parts.append([chosen[numbers] for numbers in fitting])
        accumulate = max(-(-len(part) // world_size) for part in parts)
        count = accumulate * world_size
        parts = [split_batches(part, count) for part in parts]
        parts = [part + [np.empty(0, np.int64)] * (count - len(part)) for part in parts]
    batches: list[list[Slot]] = []
    for chosen, part in zip(updates, parts, strict=True):
        factor = batch_size * accumulate * world_size / float(weight[chosen].sum())
        for mine in part[rank::world_size]:
            slots = [Slot(int(item), factor) for item in mine]
            batches.append(slots or [Slot(int(chosen[0]), 0.0)])
    return batches, accumulate


@torch.no_grad()
def fill_old_scores(
    policy: Policy,
    batches: Sequence[Sequence[Slot]],
    items: Sequence[RolloutItem],
    records: Sequence[Trajectory],
    *,
    report: Report = no_report,
) -> dict[str, Tensor]:
    """Scores the batches of this process before the first update.

    The batches are those of training, so that the first ratio is 1 to the last bit. How far the
    sampler's probabilities lie from those of the training forward is measured on the way.

    Args:
        policy: the policy.
        batches: from :func:`shard_items`.
        items: all items.
        records: all records.
        report: told after every batch.

    Returns:
        Sums over this process's tokens: ``mismatch`` (absolute difference of log-probabilities),
        ``mismatch_signed`` (sampler less training, the estimated divergence), ``num_compared``.
    """
    objective = policy.objective
    zero = torch.zeros((), dtype=torch.float64)
    sums = {"mismatch": zero, "mismatch_signed": zero.clone(), "num_compared": zero.clone()}
    for item in items:
        sampled = records[item.record].signals.get(SAMPLED)
        if sampled is not None and item.unit is None:
            item.behaviour = torch.tensor(sampled)[item.cells]
    if objective.old_log_prob == "behaviour":
        _take_behaviour(batches, items, records)
    wants_values = policy.value is not None
    trained = {slot.item for slots in batches for slot in slots if slot.factor}
    for done, slots in enumerate(batches):
        chosen = [items[slot.item] for slot in slots]
        batch = collate_items([(item, 1.0) for item in chosen], records, policy.row_spec)
        batch = batch.to(policy.device)
        scores = policy.score(batch, with_value=wants_values)
        log_prob = scores.log_prob.cpu()
        old_value = None if scores.value is None else scores.value.cpu()
        reference = None
        if objective.kl_to == "initial":
            reference = policy.reference_log_prob(batch).cpu()
        sizes = [item.num_units for item in chosen]
        ends = np.cumsum(sizes).tolist()
        for item, slot, end in zip(chosen, slots, ends, strict=True):
            if not slot.factor and slot.item in trained:
                continue  # its copy with weight, in another batch, says what is compared
            part = slice(end - item.num_units, end)
            if objective.old_log_prob == "recompute":
                item.old_log_prob = log_prob[part].clone()
            if old_value is not None:
                item.old_value = old_value[part].clone()
            if reference is not None:
                item.reference = reference[part].clone()
            if item.behaviour is not None and slot.factor > 0:
                difference = (item.behaviour - log_prob[part]).double()
                difference = difference[difference.isfinite()]
                sums["mismatch"] += difference.abs().sum()
                sums["mismatch_signed"] += difference.sum()
                sums["num_compared"] += len(difference)
        report("old log-probabilities", done + 1, len(batches))
    return sums


def _take_behaviour(
    batches: Sequence[Sequence[Slot]], items: Sequence[RolloutItem], records: Sequence[Trajectory]
) -> None:
    for slots in batches:
        for slot in slots:
            item = items[slot.item]
            if item.behaviour is None:
                raise ValueError(
                    f"objective.old_log_prob: {records[item.record].uid} holds no probabilities of "
                    f"its sampler ({SAMPLED}), or its states are views; use recompute"
                )
            # What the end-of-text fill wrote was not drawn.
            known = item.behaviour.isfinite()
            item.old_log_prob = torch.where(known, item.behaviour, 0.0)
            item.weight = torch.where(known, item.weight, 0.0)
            item.kl_weight = torch.where(known, item.kl_weight, 0.0)


def _mismatch(sums: dict[str, Tensor], ranks: Ranks) -> dict[str, float]:
    """Means over all processes of what separates the sampler from the training forward."""
    total = ranks.sum(torch.stack(list(sums.values())).float())
    named = dict(zip(sums, total.tolist(), strict=True))
    count = named.pop("num_compared")
    return {f"rollout/{name}": value / count for name, value in named.items() if count}
