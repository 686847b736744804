"""One RL step, from prompts to the batches that the policy is updated on (arXiv:2509.06949).

:func:`rl_step` reads from top to bottom like the algorithm of the paper; the functions below it are
its parts in the same order, numbered as on the page about the architecture. It runs without
gradients in evaluation mode, before the first update (8, ``TraceRLModule.training_step``).
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
from lit_dlm.rl.batch import RolloutBatch, SampleBuilder, join, order_of_writing
from lit_dlm.rl.metrics import rollout_metrics
from lit_dlm.rl.rollout import Report, Rollouts, RolloutSource, ScoredRollout, groups_of, in_order
from lit_dlm.rl.settings import PolicyObjective, RolloutSettings, ValueObjective
from lit_dlm.system.options import refuse
from lit_dlm.training.ranks import ALONE, Ranks
from lit_dlm.training.states import Masking
from lit_dlm.trajectories.record import SIGNAL_DTYPES, Trajectory

logger = logging.getLogger(__name__)

# Weight of the past in ``rollout/reward_smoothed``, which early stopping watches.
_SMOOTHING = 0.9


class TokenScores(NamedTuple):
    """What policy and value model return for a batch."""

    log_prob: Tensor  # (M,) of each token
    entropy: Tensor  # (N,) of each score, nats
    value: Tensor | None  # (M,) of each token before it was written


class Policy(Protocol):
    """What an RL step needs of the model in training; ``TraceRLModule`` implements it."""

    method: str  # of the decoder that rolls out
    objective: PolicyObjective
    value: ValueObjective | None
    masking: Masking
    rows: SampleBuilder

    @property
    def takes_token_rewards(self) -> bool: ...  # whether tokens have states of their own

    @property
    def device(self) -> torch.device: ...

    # (M,) each: scores with the current weights, values alone, scores under the initial policy.
    def score(self, batch: RolloutBatch) -> TokenScores: ...
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
    """Which samples a batch holds."""

    samples: Tensor  # (n,) int64
    factor: float  # of their weights; 0 for a copy that only fills a batch


class OldScores(NamedTuple):
    """Scores of a batch before the first update, on the CPU; ``(M,)`` each."""

    old_log_prob: Tensor
    old_value: Tensor | None = None
    reference: Tensor | None = None  # log-probabilities under the initial policy


@dataclass(frozen=True, kw_only=True)
class RLStep:
    """What one RL step trains on."""

    number: int
    rollouts: list[ScoredRollout]  # of all processes, in order, dropped groups included
    samples: RolloutBatch  # of all processes
    batches: list[MicroBatch]  # of this process
    old_scores: list[OldScores]  # of each batch
    num_slots: int  # samples of a full batch
    is_empty: bool  # the filters dropped everything; then the only batch has no weight
    metrics: dict[str, float]  # what is logged
    progress: RLProgress  # after this RL step

    def batch(self, number: int) -> RolloutBatch:
        """Returns a batch with all that training needs, on the CPU."""
        samples, factor = self.batches[number]
        batch = self.samples.select(
            samples, factor=factor, num_slots=self.num_slots, is_empty=self.is_empty
        )
        return batch.with_tokens(**self.old_scores[number]._asdict())


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
        settings: advantage, samples of a batch, passes over them, and seed.
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

    # 4. Samples: the states that each kept response went through in its decode (or others, as the
    # masking draws them), drawn anew in each pass.
    trained = rollouts.kept
    records = [one.record for one in trained]
    passes = range(settings.passes if records else 0)
    by_pass = [policy.rows.samples(records, epoch=number) for number in passes]
    is_empty = not any(map(len, by_pass))
    if is_empty:
        # Every process must still run a forward and a backward, or the others would wait for it, so
        # take the dropped responses and give them no weight.
        trained = rollouts.scored
        by_pass = [policy.rows.samples([one.record for one in trained])]
    samples = join(by_pass)
    if not len(samples):
        raise ValueError(
            f"RL step {progress.step}: no response has a token to train on; look at the decoder "
            f"'{policy.method}'"
        )

    # 5. Returns and advantages: rewards are compared within a group and, with a value model or
    # rewards per token, propagated back along the steps of the decode.
    assert settings.advantage is not None
    estimates = estimate_advantages(
        policy,
        trained,
        samples,
        advantage=settings.advantage,
        batch_size=settings.batch_size,
        ranks=ranks,
    )
    samples = estimates.filled_in(samples)
    times["value"] = time.perf_counter() - begin

    # 6. Batches: shuffled, equally many on every process.
    begin = time.perf_counter()
    if is_empty:
        batches = [MicroBatch(torch.tensor([0]), 0.0)]  # one forward, without weight
    else:
        batches = shard_samples(
            *(part.size.numpy() for part in by_pass),
            batch_size=settings.batch_size,
            accumulate=accumulate,
            rank=ranks.rank,
            world_size=ranks.world_size,
            seed=(settings.seed, progress.step),
        )

    # 7. Old and reference log-probabilities and old values, before the first update changes the
    # weights, in the same batches that are trained on: then the first ratio is exactly 1.
    old_scores, differences = score_batches(policy, batches, samples, report=report)
    times["old_log_prob"] = time.perf_counter() - begin

    # 9. What is logged and stored: dropped rollouts count as well, with a reward and no advantage.
    dropped = [] if is_empty else [one for one in rollouts.scored if not one.kept]
    noted = in_order(estimates.with_signals([*trained, *dropped]))
    metrics = rollout_metrics(noted) | estimates.metrics() | _mismatch(differences, ranks)
    after = _after(progress, rollouts, reward=metrics["rollout/reward"], is_empty=is_empty)
    metrics |= {
        "rollout/reward_smoothed": after.smoothed or 0.0,
        "rollout/skipped_steps": float(after.skipped),
        "rollout/items": float(0 if is_empty else len(samples)),
        **{f"time/{name}": value for name, value in times.items()},
    }
    return RLStep(
        number=progress.step,
        rollouts=noted,
        samples=samples,
        batches=batches,
        old_scores=old_scores,
        num_slots=settings.batch_size,
        is_empty=is_empty,
        metrics=metrics,
        progress=after,
    )


def _after(
    progress: RLProgress, rollouts: Rollouts, *, reward: float, is_empty: bool
) -> RLProgress:
    if is_empty:
        message = "RL step %d: the filters dropped all %d groups, nothing is learnt in this step"
        logger.warning(message, progress.step, rollouts.num_prompts)
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

    def filled_in(self, samples: RolloutBatch) -> RolloutBatch:
        """Returns samples whose tokens have their advantages and, with a value model, returns."""
        at = samples.tokens.response, samples.tokens.position
        known: dict[str, Tensor] = {"advantage": self.advantages[at]}
        if self.values is not None and self.returns is not None:
            known["returns"] = self.returns[at]
        return samples.with_tokens(**known)

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


def estimate_advantages(
    policy: Policy,
    rollouts: Sequence[ScoredRollout],
    samples: RolloutBatch,
    *,
    advantage: Advantage,
    batch_size: int,
    ranks: Ranks = ALONE,
) -> Estimates:
    """Returns the advantage of every token of the rollouts and, with a value model, its return.

    ``rollouts`` are those that the samples were made from. Processes share the forwards of a value
    model, each of ``batch_size`` samples.
    """
    compared, maskable = _compared(rollouts, advantage), samples.responses.maskable
    paid = [one.record.uid for one in rollouts if one.token_rewards is not None]
    if paid and not policy.takes_token_rewards:
        why = ", but neither BoundViews nor commits have states of single tokens"
        refuse(paid[0], "rewards of responses", "rewards per token", why)
    if policy.value is None and not paid:
        table = compared[:, None].expand_as(maskable)
        return Estimates(advantages=table.clone(), members=maskable)
    values = None
    if policy.value is not None:
        # A process values its share of the records and leaves the others 0, so the sum over
        # processes is the whole table.
        records = [one.record for one in rollouts]
        values = ranks.sum(_values(policy, records, samples, batch_size, ranks))
    return _along_steps(policy, rollouts, samples, compared, values)


def _along_steps(
    policy: Policy,
    rollouts: Sequence[ScoredRollout],
    samples: RolloutBatch,
    compared: Tensor,
    values: Tensor | None,
) -> Estimates:
    """Propagates rewards back along the steps; without values, as undiscounted rewards-to-go."""
    value, shrink, gae = policy.value, 1, StepGAE()
    if value is not None:
        shrink, gae = value.trace(policy.masking).shrink, StepGAE(value.gamma, value.lam)
    # A response's advantage is paid at its last step, rewards per token at their tokens. So one
    # recursion carries both back, and a token also answers for what later steps were paid.
    steps, members = order_of_writing(samples.responses, shrink=shrink)
    rewards = outcome_rewards(compared, steps, members)
    for number, rollout in enumerate(rollouts):
        if rollout.token_rewards is not None:
            paid = torch.tensor(rollout.token_rewards, dtype=torch.float32)
            rewards[number, : len(paid)] += paid * members[number, : len(paid)]
    known = torch.zeros_like(rewards) if values is None else values
    returns, advantages = gae.compute(rewards, known, steps, members)
    if value is not None and not value.needs_whole_trace(policy.masking):
        # Only the samples' own states have values; the others would be logged as 0.
        members = torch.zeros_like(members)
        members[samples.tokens.response, samples.tokens.position] = True
    return Estimates(advantages=advantages, returns=returns, values=values, members=members)


@torch.no_grad()
def _values(
    policy: Policy,
    records: Sequence[Trajectory],
    samples: RolloutBatch,
    batch_size: int,
    ranks: Ranks,
) -> Tensor:
    """Returns ``(num_records, G)`` token values of this process's share of the records, else 0."""
    assert policy.value is not None
    found = torch.zeros_like(samples.responses.steps, dtype=torch.float32)
    mine = torch.arange(ranks.rank, len(records), ranks.world_size)
    numbers = torch.isin(samples.sample_response, mine).nonzero()[:, 0]
    of = torch.arange(len(records))  # record of each response
    if policy.value.needs_whole_trace(policy.masking) and len(mine):
        # Values are those of the states that the decode went through, whatever is trained on: the
        # advantage of a step needs the value of the next one, which random states do not have.
        rows = SampleBuilder(
            policy.value.trace(policy.masking),
            policy.rows.spec,
            num_padding=policy.rows.num_padding,
            copies=policy.rows.copies,
        )
        samples = rows.samples([records[number] for number in mine.tolist()])
        of, numbers = mine, torch.arange(len(samples))
    # Entered by all processes, even one with nothing to value, since weights are gathered.
    with policy.value_weights():
        for chosen in numbers.split(batch_size) if len(numbers) else ():
            tokens = samples.tokens_of(chosen)
            values = policy.values(samples.select(chosen).to(policy.device)).float().cpu()
            response, position = samples.tokens.response, samples.tokens.position
            found[of[response[tokens]], position[tokens]] = values
    return found


# -- 6. batches ------------------------------------------------------------------------------------


def shard_samples(
    *sizes: np.ndarray,
    batch_size: int,
    accumulate: int = 1,
    rank: int = 0,
    world_size: int = 1,
    seed: tuple[int, ...] = (0,),
) -> list[MicroBatch]:
    """Shards shuffled samples into batches, equally many on every process.

    Every pass is shuffled and split on its own: no update mixes two passes. Its samples are spread
    evenly over as few updates as can hold them, at most ``batch_size * accumulate * world_size``
    each. Samples of smaller updates weigh more, so that every update is the mean over the rows of
    its own samples; a batch that gets none holds a copy of one with weight 0.

    ``sizes`` are, for each pass, the rows that each sample counts for (``size``); the samples
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
        # The trainer divides by ``accumulate`` even then, and a loss by a full batch's samples.
        factor = slots / float(weight[chosen].sum())
        # The n-th batches of all processes are adjacent, so that one process with twice the
        # accumulation trains on the same samples as two.
        for number in range(rank, count, world_size):
            samples = torch.from_numpy(chosen[number::count])
            if len(samples):
                batches.append(MicroBatch(samples, factor))
            else:
                batches.append(MicroBatch(torch.from_numpy(chosen[:1]), 0.0))
    return batches


# -- 7. old scores ---------------------------------------------------------------------------------


@torch.no_grad()
def score_batches(
    policy: Policy,
    batches: Sequence[MicroBatch],
    samples: RolloutBatch,
    *,
    report: Report = lambda *_: None,
) -> tuple[list[OldScores], Tensor]:
    """Scores the batches of this process before the first update.

    Scores belong to the batch that is trained on, since another batch of the same samples may be
    rounded differently: then the first ratio is exactly 1. Also returns ``(3,)`` float64 sums over
    this process's tokens: absolute and signed difference of log-probabilities (sampler less
    training forward, the estimated divergence), and tokens compared.
    """
    found = []
    sums = torch.zeros(3, dtype=torch.float64)
    for done, (numbers, factor) in enumerate(batches):
        batch = samples.select(numbers)
        sampled, batch = batch.tokens.sampled, batch.to(policy.device)
        scores = policy.score(batch)
        log_prob = scores.log_prob.cpu()
        if factor:  # not of a copy that only fills a batch
            difference = (sampled - log_prob).double()
            # What the sampler gave is NaN for states that it never saw.
            difference = difference[difference.isfinite()]
            counted = difference.new_tensor(len(difference))
            sums += torch.stack([difference.abs().sum(), difference.sum(), counted])
        value = None if scores.value is None else scores.value.cpu()
        reference = None
        if policy.objective.kl_to == "initial":
            reference = policy.reference_log_prob(batch).cpu()
        found.append(OldScores(log_prob, value, reference))
        report("old log-probabilities", done + 1, len(batches))
    return found, sums


def _mismatch(sums: Tensor, ranks: Ranks) -> dict[str, float]:
    """Returns mean differences of sampler and training forward over all processes."""
    mismatch, signed, count = ranks.sum(sums.float()).tolist()
    if not count:
        return {}
    return {"rollout/mismatch": mismatch / count, "rollout/mismatch_signed": signed / count}
