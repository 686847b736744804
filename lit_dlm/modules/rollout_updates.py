"""From items to updates: advantages, who trains on what, and probabilities before the first update.

One RL step is a call of :func:`fill_advantages`, one of :func:`deal`, and one of
:func:`fill_old_scores`; afterwards each batch is collated and trained on. All run without gradients
in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lit_dlm.modules.rollout_batch import RolloutBatch, collate_items
from lit_dlm.modules.rollout_items import RolloutItem, RowBuilder, order_of_writing, pick
from lit_dlm.modules.rollouts import SAMPLED, groups_of
from lit_dlm.modules.tracerl import TraceRLModule
from lit_dlm.ops.advantages import (
    GroupAdvantage,
    group_advantages,
    outcome_rewards,
    step_gae,
)
from lit_dlm.trajectories.record import SIGNAL_DTYPES, Trajectory


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """What rewards are worth to the tokens of the records trained on."""

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

    def noted(self, records: Sequence[Trajectory]) -> list[Trajectory]:
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


Move = Callable[[RolloutBatch], RolloutBatch]
"""Brings a batch to the device of the module."""


@dataclass(frozen=True)
class Slot:
    """One place of a batch."""

    item: int
    """Number of the item."""
    factor: float
    """On its weights: 0 on a copy that only fills a batch."""


def deal(
    *sizes: Sequence[float],
    batch_size: int,
    accumulate: int = 1,
    rank: int = 0,
    world_size: int = 1,
    seed: tuple[int, ...] = (0,),
) -> list[list[Slot]]:
    """Deals shuffled items to batches so that every process takes equally many.

    Every pass is shuffled and dealt on its own: no update mixes two passes. Its items are spread
    evenly over as few updates as have room for them, each of at most ``batch_size * accumulate *
    world_size``. Items of smaller updates weigh more, so that every update is the mean over the
    rows that its own stand for; batches and processes that get none hold a copy of weight 0.

    Args:
        sizes: rows that each item of each pass over the RL step stands for
            (:attr:`RolloutItem.size`); the items of a pass are numbered behind those of the passes
            before it.
        batch_size: items per batch and process, however many rows they are.
        accumulate: batches per update.
        rank: number of this process.
        world_size: processes.
        seed: what the shuffles follow from, the same on all processes.

    Returns:
        The batches of this process, in order: ``accumulate`` of each update, of the last one those
        it needs.
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
    batches: list[list[Slot]] = []
    for at, chosen in enumerate(updates):
        # The trainer counts batches, so only the last update may have fewer.
        is_last = at == len(updates) - 1
        num_batches = -(-len(chosen) // (batch_size * world_size)) if is_last else accumulate
        factor = per_update / float(weight[chosen].sum())
        # Batch n of all processes lie next to each other, so that one process with twice the
        # accumulation trains on the same.
        for number in range(num_batches):
            mine = chosen[number * world_size + rank :: num_batches * world_size]
            slots = [Slot(int(item), factor) for item in mine]
            batches.append(slots or [Slot(int(chosen[0]), 0.0)])
    return batches


def fill_advantages(
    module: TraceRLModule,
    items: Sequence[RolloutItem],
    records: Sequence[Trajectory],
    *,
    kind: GroupAdvantage,
    batch_size: int,
    move: Move,
    rank: int = 0,
    world_size: int = 1,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Estimates:
    """Gives every unit of every item its advantage, and with a value model its return and value.

    Values are those of the states that the decode went through, whatever states the items have;
    where that suffices, only those of the items (:meth:`ValueObjective.needs_whole_trace`). Every
    process evaluates its share of the records.

    Args:
        module: policy and value model.
        items: what is trained on.
        records: rollouts of one RL step, in order; their meta holds the rewards.
        kind: how rewards are compared within a group.
        batch_size: states per forward of the value model.
        move: brings a batch to the module's device.
        rank: number of this process.
        world_size: processes.
        reduce: adds up a tensor over processes; needed with several and a value model.

    Returns:
        Advantages and values of all tokens.
    """
    rewards = torch.tensor(
        [float(record.meta["reward"]) for record in records], dtype=torch.float32
    )
    compared = torch.zeros_like(rewards)
    for group in groups_of(records):
        compared[group] = group_advantages(rewards[group], kind)
    G = max(record.num_generated for record in records)
    value = module.value
    has_token_rewards = any("token_rewards" in record.meta for record in records)
    shrink = 1 if value is None else value.trace(module.corruption).shrink
    _, responses = module.rows.batch_of(records)
    if value is None and not has_token_rewards:
        for item in items:
            item.advantage = compared[item.record].expand(item.num_units).clone()
        return Estimates(
            advantages=compared[:, None].expand(-1, G).clone(), members=responses.maskable
        )
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
        mine = range(rank, len(records), world_size)
        if value.needs_whole_trace(module.corruption):
            states = _trace_items(module, records, mine)
        else:
            states = [item for item in items if item.record in mine]
            known = _cells_of(items, members)
        values = _values(module, states, records, G, batch_size, move)
        if reduce is not None:
            values = reduce(values)
    estimates = step_gae(
        token_rewards,
        values,
        steps,
        members,
        gamma=1.0 if value is None else value.gamma,
        lam=1.0 if value is None else value.lam,
    )
    for item in items:
        item.advantage = pick(estimates.advantages, item)
        if value is not None:
            item.returns = pick(estimates.returns, item)
    return Estimates(
        advantages=estimates.advantages,
        values=None if value is None else values,
        members=known,
    )


def _cells_of(items: Sequence[RolloutItem], members: Tensor) -> Tensor:
    """``(num_records, G)`` bool, the cells that some item scores."""
    found = torch.zeros_like(members)
    for item in items:
        found[item.record, item.cells] = True
    return found


def _trace_items(
    module: TraceRLModule, records: Sequence[Trajectory], mine: range
) -> list[RolloutItem]:
    """The states of every step of some records."""
    assert module.value is not None
    builder = RowBuilder(
        module.value.trace(module.corruption),
        module.row_spec,
        num_padding=module.num_padding,
        copies=module.rows.copies,
    )
    items = builder.items([records[number] for number in mine])
    for item in items:
        item.record = mine[item.record]
    return items


@torch.no_grad()
def _values(
    module: TraceRLModule,
    items: Sequence[RolloutItem],
    records: Sequence[Trajectory],
    length: int,
    batch_size: int,
    move: Move,
) -> Tensor:
    """``(num_records, G)`` values of the items' tokens before they were written, else 0."""
    values = torch.zeros(len(records), length, dtype=torch.float32)
    for first in range(0, len(items), batch_size):
        chosen = items[first : first + batch_size]
        batch = collate_items([(item, 1.0) for item in chosen], records, module.row_spec)
        found = module.values(move(batch)).float().cpu()
        parts = found.split([item.num_units for item in chosen])
        for item, part in zip(chosen, parts, strict=True):
            values[item.record, item.cells] = part
    return values


@torch.no_grad()
def fill_old_scores(
    module: TraceRLModule,
    batches: Sequence[Sequence[Slot]],
    items: Sequence[RolloutItem],
    records: Sequence[Trajectory],
    *,
    move: Move,
    report: Callable[[int], None] | None = None,
) -> dict[str, Tensor]:
    """Scores the batches of this process before the first update.

    The batches are those of training, so that the first ratio is 1 to the last bit. How far the
    sampler's probabilities lie from those of the training forward is measured on the way.

    Args:
        module: the policy.
        batches: from :func:`deal`.
        items: all items.
        records: all records.
        move: brings a batch to the module's device.
        report: told after every batch how many are done.

    Returns:
        Sums over this process's tokens: ``mismatch`` (absolute difference of log-probabilities),
        ``mismatch_signed`` (sampler less training, the estimated divergence), ``num_compared``.
    """
    objective = module.objective
    zero = torch.zeros((), dtype=torch.float64)
    sums = {"mismatch": zero, "mismatch_signed": zero.clone(), "num_compared": zero.clone()}
    for item in items:
        sampled = records[item.record].signals.get(SAMPLED)
        if sampled is not None and item.unit is None:
            item.behaviour = torch.tensor(sampled)[item.cells]
    if objective.old_log_prob == "behaviour":
        _take_behaviour(batches, items, records)
    wants_values = module.value is not None
    trained = {slot.item for slots in batches for slot in slots if slot.factor}
    for done, slots in enumerate(batches):
        chosen = [items[slot.item] for slot in slots]
        batch = move(collate_items([(item, 1.0) for item in chosen], records, module.row_spec))
        scores = module.score(batch, with_value=wants_values)
        log_prob = scores.log_prob.cpu()
        old_value = None if scores.value is None else scores.value.cpu()
        reference = None
        if objective.kl_to == "initial":
            reference = module.reference_log_prob(batch).cpu()
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
        if report is not None:
            report(done + 1)
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
