"""One step of a decode: the only place where a mask turns into a token.

:func:`decide` says what a step does and :func:`advance` what the next one finds. Neither changes
anything or waits for a GPU. What differs between methods is in the parts of the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lit_dlm.backbones.visibility import first_column
from lit_dlm.decoding.caches import Forwards
from lit_dlm.decoding.decoder import Decoder
from lit_dlm.decoding.policies.base import CommitPolicy
from lit_dlm.decoding.state import (
    BROKEN,
    COMPLETE,
    EOS,
    STEP_LIMIT,
    DecodeState,
    Observer,
    Selection,
    StepRecord,
)
from lit_dlm.decoding.windows import WindowView, masks_first
from lit_dlm.system.options import of_kind
from lit_dlm.tensors.batches import reads_are_free
from lit_dlm.tensors.sampling import top_quota


@dataclass(frozen=True)
class Decision:
    """What one step decides, before anything is written."""

    record: StepRecord  # the step as observers see it; its state has entered the window's block
    by_policy: Tensor  # (b,) bool: the policy decided; elsewhere the stall rule did
    # (b,) bool: the end-of-text rule ends the row after this step; None without it
    ended: Tensor | None
    kept_open: Tensor  # (b, L) bool: see :class:`DecodeState`


def decide(
    state: DecodeState,
    decoder: Decoder,
    forwards: Forwards,
    *,
    requires: frozenset[str],
    policy_timer: AbstractContextManager[object] | None = None,
) -> Decision:
    """Decides one step of all rows; nothing in it waits for a GPU.

    Verification by re-execution calls this too, so it repeats the loop itself and not a copy.
    """
    policy, sampler, rules = decoder.policy, decoder.sampler, decoder.settings
    assert decoder.window is not None  # see Decoder.on
    # 1. The window: where a row may write now.
    view = of_kind(decoder.window.view(state), WindowView, option="window.view")
    state, candidates = enter_block(state, view), view.candidates
    # 2. The forward, of the window's columns. What the policy remembers may change the logits.
    columns = columns_to_predict(state, view, requires)
    denoised, forced = forwards.denoise(state, columns)
    # In place: the logits of a large vocabulary are the largest tensor of a step.
    sampler.restrict(denoised, forwards.backbone.spec)
    state, denoised = policy.remember(state, candidates, denoised)
    # 3. The proposal: a token for each column, and how probable it is.
    proposal = sampler.propose(state, denoised, requires)
    # 4. What may be committed, and how much: the quota counts all candidates of the window. The
    #    gate comes before the policy, which then spends its quota on what may be committed.
    counts = decoder.quota.counts(state, candidates)
    if rules.eos_gate:
        candidates = end_of_text_gate(state, candidates, proposal.ids)
    if forced is not None:  # cells that only the refresh of a cache can predict
        candidates = torch.where(forced.any(1, keepdim=True), forced, candidates)
    # 5. What is committed: the policy selects, the rules of the loop have the last word.
    with policy_timer or nullcontext():
        selection = policy.select(state, candidates, proposal, counts)
    of_kind(selection, Selection, option="policy.select")
    if selection.rewritten is not None and not policy.takes_back:
        name = type(policy).__name__
        raise ValueError(f"policy: {name} rewrites cells; expected takes_back = True in it")
    commit, by_policy = committed(state, candidates, selection, forced, decoder)
    # 6. The canvas after the step: commits, what the policy rewrites, the end of the text.
    new_ids = torch.where(commit, proposal.ids, state.ids)
    if selection.rewritten is not None:
        new_ids = torch.where(state.standing, selection.rewritten, new_ids)
        # Such a policy may write what nobody proposed. What counts as committed, for records and
        # probabilities of draws, is only what was proposed and now stands.
        commit = (new_ids != state.ids) & (new_ids == proposal.ids) & (new_ids != state.mask_id)
    kept_open, ended = torch.zeros_like(state.masked), None
    if selection.keep_block_open is not None:
        # A mark in its first column keeps the window, which begins at what is unfinished, there.
        kept_open.scatter_(1, view.columns[:, :1], selection.keep_block_open[:, None])
    if rules.eos_rule != "none":
        ended = text_ends(state, new_ids)
        if selection.keep_block_open is not None:
            # A row that is kept open may still change what stands before its end of text.
            ended = ended & ~selection.keep_block_open
        if rules.eos_rule == "fill":
            is_left = ended[:, None] & state.editable & (new_ids == state.mask_id)
            new_ids = torch.where(is_left, state.eos_ids[0], new_ids)
    if selection.memory is not None:
        state = replace(state, memory=selection.memory)
    record = StepRecord(
        state=state,
        proposal=proposal,
        candidates=candidates,
        commit=commit,
        scores=selection.scores,
        new_ids=new_ids,
        denoised=denoised if "logits" in requires else None,
    )
    return Decision(record, by_policy, ended, kept_open)


def advance(decision: Decision, *, new_ids: Tensor | None = None) -> DecodeState:
    """Returns the state before the next step.

    ``new_ids`` ``(b, L)`` take the place of the step's own, where a record says what it wrote.
    """
    record, state = decision.record, decision.record.state
    ids = record.new_ids if new_ids is None else new_ids
    # Not only commits: also an end-of-text fill and what a policy takes back.
    written = ids != state.ids
    # The canvas alone says what is masked: an edit, a token taken back and a fill all show here.
    masked = state.editable & (ids == state.mask_id)
    step = state.step + 1
    # Of several reasons to end, the last one below is the row's: a broken row is never complete,
    # and a row that has no masks left is, whatever ended it.
    status = (step >= state.budget) * STEP_LIMIT
    if decision.ended is not None:
        status = status.masked_fill(decision.ended, EOS)
    status = status.masked_fill(~(masked | decision.kept_open).any(1), COMPLETE)
    status = status.masked_fill(record.proposal.prob.sum(1).isnan(), BROKEN)
    return replace(
        state,
        ids=ids,
        masked=masked,
        step=step,
        status=status,
        block_step=state.block_step + 1,
        written=written,
        kept_open=decision.kept_open,
        num_wrote=state.num_wrote + written.any(1),
        num_decided=state.num_decided + decision.by_policy,
    )


def columns_to_predict(state: DecodeState, view: WindowView, requires: frozenset[str]) -> Tensor:
    """``(b, K)`` int64 columns that go through the head: the window's, or the whole response."""
    columns = view.columns
    if "region" in requires:
        # Policies that compare a position with its past need it in every step, outside windows too.
        region = torch.arange(state.start, state.ids.shape[1], device=columns.device)
        return region.expand(len(state.rows), -1)
    # A CPU pays for each row that passes the head. A GPU does not notice half a block, but would
    # have to wait for the number of masks.
    if reads_are_free(columns.device) and "window" not in requires:
        return columns.gather(1, masks_first(state, columns))
    return columns


def committed(
    state: DecodeState,
    candidates: Tensor,
    selection: Selection,
    forced: Tensor | None,
    decoder: Decoder,
) -> tuple[Tensor, Tensor]:
    """Applies cap, forced cells and stall rule; ``(b, L)`` commits and ``(b,)`` ``by_policy``."""
    rules, window = decoder.settings, decoder.window
    assert window is not None
    # A policy may select more than the candidates; cap and stall rule see only candidates.
    commit = selection.commit & candidates
    if rules.max_commits_per_step is not None:
        # Ranked by a stable sort and not by topk: many cells have a probability of exactly 1, and
        # among equals topk chooses differently in another batch.
        commit = top_quota(selection.scores, commit, rules.max_commits_per_step)
    if forced is not None:
        commit = commit | forced
    by_policy = commit.any(1)
    if selection.rewritten is not None:  # such a policy ensures progress itself
        return commit, torch.ones_like(by_policy)
    if rules.stall_rule != "top1":
        return commit, by_policy
    moves = by_policy
    if window.pipelined:
        stalled = window.stalled(state, candidates, commit, selection.scores)
        commit, by_policy = commit | stalled, by_policy & ~stalled.any(1)
        if not rules.eos_gate:  # which may hold back all of the first block
            return commit, by_policy
        moves = commit.any(1)
    # Asking first costs less than the ranking, which is mostly not needed.
    if not (reads_are_free(moves.device) and bool(moves.all())):
        best = top_quota(selection.scores, candidates, 1)
        commit = torch.where(moves[:, None], commit, best)
    return commit, by_policy


_SCORES = ("prob", "entropy", "margin")
KNOWN = frozenset(
    ("hidden", "logits", "window", "region", "drawn", *_SCORES, *(f"raw_{s}" for s in _SCORES))
)
"""What policies and observers may require (see :class:`CommitPolicy`)."""


def needs(
    policy: CommitPolicy, observers: Sequence[Observer] = ()
) -> tuple[frozenset[str], tuple[int, ...]]:
    """Returns the names of what a step must compute (see :class:`CommitPolicy`), and the layers."""
    parts: list[Any] = [policy, *observers]
    requires: frozenset[str] = frozenset().union(*(part.requires for part in parts))
    if unknown := sorted(requires - KNOWN):
        raise ValueError(f"requires: expected some of {sorted(KNOWN)}, got {unknown[0]!r}")
    if "hidden" not in requires:
        return requires, ()
    layers = {tuple(part.hidden_layers) for part in parts if "hidden" in part.requires}
    if len(layers) != 1:
        raise ValueError(f"hidden_layers: policy and observers must agree, got {sorted(layers)}")
    return requires, layers.pop()


def enter_block(state: DecodeState, view: WindowView) -> DecodeState:
    """Enters the blocks of a window; the counts of steps and masks restart in new blocks."""
    # Quotas share the masks that a block had when the row entered it by the steps since then.
    entered = view.block != state.block
    return replace(
        state,
        block=view.block,
        block_step=state.block_step.masked_fill(entered, 0),
        block_masks=torch.where(entered, view.candidates.sum(1), state.block_masks),
        num_blocks=view.num_blocks,
        window=view.columns,
    )


def end_of_text_gate(state: DecodeState, candidates: Tensor, proposals: Tensor) -> Tensor:
    """``(b, L)`` bool candidates: a row without an end of text loses those that propose one.

    A row whose candidates all propose an end of text keeps them.
    """
    has_eos = (state.editable & torch.isin(state.ids, state.eos_ids)).any(1)
    # Early ends of text are the usual failure of confidence orders, which are surest of padding.
    other = candidates & ~torch.isin(proposals, state.eos_ids)
    keep_all = has_eos | ~other.any(1)
    return torch.where(keep_all[:, None], candidates, other)


def text_ends(state: DecodeState, new_ids: Tensor) -> Tensor:
    """``(b,)`` bool: rows with an end of text behind all prefilled cells and no mask before it."""
    columns = torch.arange(new_ids.shape[1], device=new_ids.device)
    # An end of text before a prefilled cell, such as a marker, ends only the part before it.
    prefilled = (~state.editable & (columns >= state.start)).long() * columns
    is_eos = torch.isin(new_ids, state.eos_ids) & (columns > prefilled.amax(1, keepdim=True))
    is_eos = is_eos & state.editable
    masked = state.editable & (new_ids == state.mask_id)
    before = columns < first_column(is_eos)[:, None]
    return is_eos.any(1) & ~(masked & before).any(1)
