"""Credit of single commits: decodes that differ in one decision, and what each is worth.

The first response to a prompt is the greedy decode, at the policy's threshold. Each of the others
is the same decode with one decision changed: a candidate that was committed is left, or the other
way round. What its reward differs by is due to this decision, which alone is trained. Decisions are
drawn by how open they are, ``p (1 - p)`` with the probability ``p`` of a commit. A fork in which
the stall rule commits again what was left is the same decode, and trains nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from lit_dlm.decoding.state import DecodeState, Proposal, Selection
from lit_dlm.rl.engine import RolloutPrompt
from lit_dlm.rl.rollout import DecodingEngine, OnlineRollouts
from lit_dlm.tensors.sampling import sample_seed
from lit_dlm.tracelock.policy import TraceLockPolicy
from lit_dlm.training.ranks import Ranks
from lit_dlm.trajectories.record import Trajectory

FORK = "fork"
"""Entry of a record's meta: step and response position of its changed decision."""


class ForkedPolicy(TraceLockPolicy):
    """Commits what reaches the threshold, and changes one decision of some rows.

    ``temperature`` is that of the probabilities by which decisions are drawn and trained.
    """

    # (3, n) int64: sample seed of a row, step (-1 for none) and position of its changed decision.
    changed = torch.full((3, 1), -1)

    @classmethod
    def of(cls, policy: TraceLockPolicy) -> ForkedPolicy:
        """Returns a policy that decides as this one does, without drawing."""
        forked = cls.__new__(cls)
        forked.__dict__.update(policy.__dict__)
        return forked

    def select(
        self, state: DecodeState, candidates: Tensor, proposal: Proposal, quota: Tensor | None
    ) -> Selection:
        logits = self.decision_logits(state, candidates, proposal)
        commit = candidates & (self.log_odds(logits) > 0)
        if self.changed.device != logits.device:
            self.changed = self.changed.to(logits.device)
        seed, step, position = self.changed
        meets = (state.seeds[:, None] == seed) & (state.step[:, None] == step)
        # One of a row at most: -1 where there is none, the last column of the prompt, which is no
        # candidate. Nothing is read, so that a graph may hold the step.
        at = torch.where(meets, position, -1).amax(1, keepdim=True)
        column = torch.arange(candidates.shape[1], device=logits.device) - state.start
        commit = commit ^ (candidates & (column == at))
        return Selection(commit, logits)


class ForkedRollouts(OnlineRollouts):
    """Rolls out the greedy decode of each prompt, then decodes that differ in one decision."""

    def decoded(
        self,
        engine: DecodingEngine,
        asked: Sequence[RolloutPrompt],
        ranks: Ranks,
        report: Callable[[int], None],
        spent: dict[str, float],
    ) -> list[Trajectory]:
        size, seed = self.settings.responses_per_prompt, engine.module.seed
        policy = engine.module.decoders[engine.method].policy
        assert isinstance(policy, ForkedPolicy)
        policy.changed = ForkedPolicy.changed
        first = super().decoded(engine, asked[::size], ranks, report, spent)
        forks = [one for number, one in enumerate(asked) if number % size]
        decisions = chain.from_iterable(
            open_decisions(record, size - 1, seed=sample_seed(seed, record.uid)) for record in first
        )
        forks = [
            replace(one, meta={**one.meta, FORK: at}) if at else one
            for one, at in zip(forks, decisions, strict=True)
        ]
        changed = [(sample_seed(seed, one.uid), *one.meta.get(FORK, (-1, 0))) for one in forks]
        policy.changed = torch.tensor(changed).T
        before = -(-len(first) // ranks.world_size)
        rest = super().decoded(engine, forks, ranks, lambda n: report(before + n), spent)
        found = iter(rest)
        return [first[n // size] if n % size == 0 else next(found) for n in range(len(asked))]


def open_decisions(record: Trajectory, count: int, *, seed: int) -> list[tuple[int, int] | None]:
    """Draws decisions of a record, without replacement: each a step and a response position.

    There are ``count`` of them, with ``None`` at the end where the record has fewer.
    """
    log_odds = np.abs(record.signals["step_log_odds"].astype(np.float64))
    # The logarithm of p (1 - p), which is even in the log-odds, without overflow.
    openness = -log_odds - 2.0 * np.log1p(np.exp(-log_odds))
    openness[record.signals["step_commit"] < 0] = -np.inf  # no candidate
    noise = np.random.default_rng(seed).gumbel(size=len(openness))
    order = np.argsort(-(openness + noise), kind="stable")[:count]
    drawn: list[tuple[int, int] | None] = [None] * count
    rows = record.masked_rows()
    for place, number in enumerate(order):
        if openness[number] > -np.inf:
            drawn[place] = int(rows[number, 0]), int(rows[number, 1])
    return drawn
