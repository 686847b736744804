"""The one decode loop: the only place where a mask turns into a token.

Trace generation, benchmarks, rollouts and validation samples all call :func:`decode`. What differs
between methods is in the plugs (window, quota, sampler, policy) and in the observers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor

from lit_dlm.backbones.base import Backbone, Denoised
from lit_dlm.decoding.caches import CacheScheme, CacheSession
from lit_dlm.decoding.observers import Observer
from lit_dlm.decoding.policies.base import CommitPolicy
from lit_dlm.decoding.quotas import Quota
from lit_dlm.decoding.sampler import Sampler
from lit_dlm.decoding.state import Canvas, DecodeResult, DecodeState, Status, StepRecord
from lit_dlm.decoding.stopwatch import Span
from lit_dlm.decoding.windows import Window, WindowView, check_window, first_column, masks_first
from lit_dlm.ops.scores import top_quota


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """Engine options: step budget, end-of-text handling, stall rule. Recorded with every result."""

    max_steps: int | None = None
    """Most steps a row may take; ``None``: as many as it has masks."""
    stall_rule: Literal["top1", "idle"] = "top1"
    """A row without a commit: ``top1`` commits its best-scored candidate, ``idle`` lets the step
    pass (some releases then stop at the budget with masks left)."""
    eos_rule: Literal["none", "stop", "fill"] = "none"
    """Once an end of text is committed and no mask is left of it: ``stop`` ends the row with masks
    behind it, ``fill`` ends it and writes end of text there, ``none`` decodes on."""
    eos_gate: bool = False
    """Until a row holds an end of text, commit one only when all its candidates propose one."""
    max_commits_per_step: int | None = None
    """Cap on the commits of a row in one step; the policy's best-scored ones stay."""

    def __post_init__(self) -> None:
        for name in ("max_steps", "max_commits_per_step"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        if self.stall_rule == "idle" and self.max_steps is None:
            raise ValueError("max_steps: expected a number with stall_rule 'idle', got None")


def decode(
    backbone: Backbone,
    canvas: Canvas,
    *,
    window: Window,
    quota: Quota,
    sampler: Sampler,
    policy: CommitPolicy,
    cache: CacheScheme | None = None,
    settings: DecodeSettings | None = None,
    observers: Sequence[Observer] = (),
) -> DecodeResult:
    """Fills the masks of a canvas.

    One step: window, forward, proposal, selection, then the gate, the cap and the stall rule, then
    the write. Finished rows leave the batch. The loop synchronises with the device once a step, for
    the leftmost mask of every row.

    Args:
        backbone: the denoiser.
        canvas: the start; its masks must be editable cells.
        window: where a step may commit.
        quota: how many it commits.
        sampler: which tokens are proposed.
        policy: which of them become final.
        cache: what steps take from earlier forwards; nothing by default.
        settings: rules of the loop.
        observers: read-only callbacks.

    Returns:
        The final canvas and the counts of every row.

    Raises:
        ValueError: the canvas holds a mask that may not be written, or the model cannot have the
            window or the cache.
    """
    settings = settings or DecodeSettings()
    check_window(window, backbone.spec)
    _, hidden_layers = needs(policy, observers)
    with torch.no_grad():
        state = initial_state(backbone, canvas)
        budget = settings.max_steps or int(state.masked.sum(1).max())
        session = None
        if cache is not None:
            session = cache.start(backbone, state, window=window, hidden_layers=hidden_layers)
        tally = _Tally(canvas)
        for observer in observers:
            observer.on_start(state)
        policy_spans: list[tuple[Tensor, Span]] = []
        clock = time.perf_counter()
        frontier = _frontier(state.masked, state.masked.any(1))
        while (kept := _open_rows(frontier)) and state.step < budget:
            if len(kept) < len(frontier):
                # Finished rows leave the batch, so that later forwards cost less.
                index = torch.tensor(kept).to(canvas.ids.device, non_blocking=True)
                state = state.take(index)
                if session is not None:
                    session.take(kept, index)
            state = replace(state, frontier=tuple(frontier[row] for row in kept))
            decision = decide(
                backbone,
                state,
                window=window,
                quota=quota,
                sampler=sampler,
                policy=policy,
                settings=settings,
                requires=needs(policy, observers)[0],
                hidden_layers=hidden_layers,
                session=session,
            )
            record, ended = decision.record, decision.ended
            state, new_ids = record.state, record.new_ids
            looked = time.perf_counter()
            for observer in observers:
                observer.on_step(record)
            clock += time.perf_counter() - looked  # observers are not part of a method's time
            masked = state.editable & (new_ids == state.mask_id)
            tally.add(state, new_ids, record.commit, decision.stalled, ended)
            if decision.policy_span is not None:
                policy_spans.append((state.rows, decision.policy_span))
            state = replace(
                state,
                ids=new_ids,
                masked=masked,
                step=state.step + 1,
                block_step=state.block_step + 1,
                written=new_ids != state.ids,
            )
            frontier = _frontier(masked, masked.any(1) & ~ended)
            now = time.perf_counter()
            tally.add_seconds(state.rows, now - clock)
            clock = now
        result = tally.result(
            canvas,
            state.mask_id,
            forwards_per_step=policy.forwards_per_step,
            count_stalls=settings.stall_rule == "top1",
            session=session,
            policy_spans=policy_spans,
        )
        for observer in observers:
            observer.on_end(result)
    return result


@dataclass(frozen=True)
class Decision:
    """What one step decides, before anything is written."""

    record: StepRecord
    """The step as observers see it; its state has entered the window's block."""
    stalled: Tensor
    """``(b,)`` bool: the policy committed nothing, so the stall rule decided."""
    ended: Tensor
    """``(b,)`` bool: the end-of-text rule ends the row after this step."""
    policy_span: Span | None = None
    """Time that the policy took; ``None`` where no policy decided."""


def decide(
    backbone: Backbone,
    state: DecodeState,
    *,
    window: Window,
    quota: Quota,
    sampler: Sampler,
    policy: CommitPolicy,
    settings: DecodeSettings,
    requires: frozenset[str],
    hidden_layers: tuple[int, ...] = (),
    session: CacheSession | None = None,
) -> Decision:
    """One step of the loop: window, forward, proposal, selection, gate, cap, stall and end rules.

    Both :func:`decode` and verification by re-execution take their decisions here, so the second
    repeats the first and not a copy of it.

    Args:
        backbone: the denoiser.
        state: the state before the step; all its rows have a mask.
        window: where the step may commit.
        quota: how many it commits.
        sampler: which tokens are proposed.
        policy: which of them become final.
        settings: rules of the loop.
        requires: what policy and observers read, see :func:`needs`.
        hidden_layers: hidden snapshots that they read.
        session: the cache of the decode, which this step reads and writes; ``None`` without one.

    Returns:
        The decision. The canvas itself is not changed.
    """
    view = window.view(state)
    state = enter_block(state, view)
    # The head runs at the window's columns alone, unless somebody reads the whole response.
    columns = view.columns
    if "region" in requires:
        region = torch.arange(state.start, state.ids.shape[1], device=columns.device)
        columns = region.expand(len(state.rows), -1)
    forced = None
    if session is None:
        denoised = _denoise(backbone, state, columns, hidden_layers)
    else:
        if "region" not in requires and columns.device.type == "cpu":
            columns = columns.gather(1, masks_first(state, columns))
        denoised, forced = session.denoise(state, columns)
    proposal = sampler.propose(state, denoised, requires)
    # The gate comes before the policy, which then spends its quota on what may be committed.
    candidates = view.candidates
    if settings.eos_gate:
        candidates = end_of_text_gate(state, candidates, proposal.ids)
    if forced is not None:  # cells that only the refresh of a cache can predict
        candidates = torch.where(forced.any(1, keepdim=True), forced, candidates)
    counts = quota.counts(state, view.candidates)
    with Span(state.ids.device) as policy_span:
        selection = policy.select(state, candidates, proposal, counts)
    # A policy may ask for more than it was offered; cap and stall rule see what is left of it.
    commit = selection.commit & candidates
    if settings.max_commits_per_step is not None:
        commit = top_quota(selection.scores, commit, settings.max_commits_per_step)
    if forced is not None:
        commit = commit | forced
    stalled = ~commit.any(1)
    # On the CPU the question costs less than the ranking that it mostly saves.
    if settings.stall_rule == "top1" and (stalled.device.type != "cpu" or bool(stalled.any())):
        best = top_quota(selection.scores, candidates, 1)
        commit = torch.where(stalled[:, None], best, commit)
    new_ids = torch.where(commit, proposal.ids, state.ids)
    ended = torch.zeros_like(stalled)
    if settings.eos_rule != "none":
        new_ids, ended = _apply_eos_rule(state, new_ids, fill=settings.eos_rule == "fill")
    record = StepRecord(
        state=state,
        proposal=proposal,
        candidates=candidates,
        commit=commit,
        scores=selection.scores,
        new_ids=new_ids,
        denoised=denoised if "logits" in requires else None,
    )
    return Decision(record, stalled, ended, policy_span)


def _denoise(
    backbone: Backbone, state: DecodeState, columns: Tensor, hidden_layers: tuple[int, ...]
) -> Denoised:
    """One forward over the whole canvas."""
    # Only block models ask where the response begins.
    origin = {"response_start": state.start} if backbone.spec.attention == "block" else {}
    return backbone.denoise(
        state.ids, pad_mask=state.pad_mask, columns=columns, hidden_layers=hidden_layers, **origin
    )


def _frontier(masked: Tensor, is_open: Tensor) -> list[int]:
    """The leftmost mask of every row, -1 in rows that are done: the loop waits here for the device.

    One transfer tells how many rows are left, which ones, and in which block each of them is.
    """
    return torch.where(is_open, first_column(masked), -1).tolist()


def _open_rows(frontier: list[int]) -> list[int]:
    return [row for row, column in enumerate(frontier) if column >= 0]


def needs(
    policy: CommitPolicy, observers: Sequence[Observer] = ()
) -> tuple[frozenset[str], tuple[int, ...]]:
    """What a step must compute for a policy and observers.

    Returns:
        Names (see :class:`CommitPolicy`) and the hidden layers that all agree on.

    Raises:
        ValueError: they ask for different hidden layers.
    """
    requires = policy.requires.union(*(observer.requires for observer in observers))
    return requires, _hidden_layers([policy, *observers]) if "hidden" in requires else ()


def initial_state(backbone: Backbone, canvas: Canvas) -> DecodeState:
    """The state before step 0.

    Raises:
        ValueError: the canvas holds a mask that may not be written.
    """
    spec = backbone.spec
    ids, device = canvas.ids, canvas.ids.device
    stray = (ids == spec.mask_id) & ~canvas.editable
    if bool(stray.any()):
        row, column = stray.nonzero()[0].tolist()
        raise ValueError(
            f"canvas: row {row}, column {column} holds the mask id {spec.mask_id} but may not be "
            "written; a prompt must not contain the mask token"
        )
    if canvas.pad_mask is None:
        positions = torch.arange(ids.shape[1], device=device).expand_as(ids)
    else:
        positions = (canvas.pad_mask.long().cumsum(1) - 1).clamp_min(0)
    zeros = torch.zeros(len(ids), dtype=torch.long, device=device)
    return DecodeState(
        ids=ids,
        editable=canvas.editable,
        masked=canvas.editable & (ids == spec.mask_id),
        positions=positions,
        rows=torch.arange(len(ids), device=device),
        seeds=canvas.seeds,
        step=0,
        start=canvas.start,
        mask_id=spec.mask_id,
        eos_ids=torch.tensor(spec.eos_ids, device=device),
        pad_mask=canvas.pad_mask,
        block=zeros - 1,
        block_step=zeros,
        block_masks=zeros,
        regions=canvas.regions,
    )


def _hidden_layers(plugs: Iterable[object]) -> tuple[int, ...]:
    """The hidden layers that all plugs agree on."""
    asked = {
        tuple(cast(Sequence[int], plug.hidden_layers))  # type: ignore[attr-defined]
        for plug in plugs
        if "hidden" in plug.requires  # type: ignore[attr-defined]
    }
    if len(asked) != 1:
        raise ValueError(f"hidden_layers: policy and observers must agree, got {sorted(asked)}")
    return asked.pop()


def enter_block(state: DecodeState, view: WindowView) -> DecodeState:
    """Starts the count of steps and masks in rows that came into a new block."""
    entered = view.block != state.block
    return replace(
        state,
        block=view.block,
        block_step=state.block_step.masked_fill(entered, 0),
        block_masks=torch.where(entered, view.candidates.sum(1), state.block_masks),
        num_blocks=view.num_blocks,
    )


def end_of_text_gate(state: DecodeState, candidates: Tensor, proposals: Tensor) -> Tensor:
    """Drops end-of-text proposals from rows that hold no end of text yet.

    Args:
        state: the state before the step.
        candidates: ``(b, L)`` bool.
        proposals: ``(b, L)`` int64 proposed tokens.

    Returns:
        ``(b, L)`` bool; a row all of whose candidates propose an end of text keeps them.
    """
    has_eos = (state.editable & torch.isin(state.ids, state.eos_ids)).any(1)
    other = candidates & ~torch.isin(proposals, state.eos_ids)
    keep_all = has_eos | ~other.any(1)
    return torch.where(keep_all[:, None], candidates, other)


def _apply_eos_rule(state: DecodeState, new_ids: Tensor, *, fill: bool) -> tuple[Tensor, Tensor]:
    """Finds rows whose answer is ended: an end of text without a mask to its left."""
    is_eos = state.editable & torch.isin(new_ids, state.eos_ids)
    masked = state.editable & (new_ids == state.mask_id)
    columns = torch.arange(new_ids.shape[1], device=new_ids.device)
    before = columns < first_column(is_eos)[:, None]
    ended = is_eos.any(1) & ~(masked & before).any(1)
    if fill:
        new_ids = torch.where(masked & ended[:, None], state.eos_ids[0], new_ids)
    return new_ids, ended


class _Tally:
    """Counts of every row of the starting batch; finished rows keep their last values."""

    def __init__(self, canvas: Canvas) -> None:
        zeros = torch.zeros(len(canvas.ids), dtype=torch.long, device=canvas.ids.device)
        self.ids = canvas.ids.clone()
        self.num_steps = zeros
        self.num_forwards = 0
        self.idle_steps = zeros.clone()
        self.stalled_steps = zeros.clone()
        self.ended = zeros.bool()
        self.seconds = torch.zeros_like(zeros, dtype=torch.float64)

    def add(
        self, state: DecodeState, new_ids: Tensor, commit: Tensor, stalled: Tensor, ended: Tensor
    ) -> None:
        rows = state.rows
        self.num_forwards += 1
        self.ids.index_copy_(0, rows, new_ids)
        self.num_steps = self.num_steps.index_add(0, rows, torch.ones_like(rows))
        self.idle_steps.index_add_(0, rows, (~commit.any(1)).long())
        self.stalled_steps.index_add_(0, rows, stalled.long())
        self.ended.index_copy_(0, rows, ended)

    def add_seconds(self, rows: Tensor, seconds: float) -> None:
        _share(self.seconds, rows, seconds)

    def result(
        self,
        canvas: Canvas,
        mask_id: int,
        *,
        forwards_per_step: int,
        count_stalls: bool,
        session: CacheSession | None,
        policy_spans: Sequence[tuple[Tensor, Span]],
    ) -> DecodeResult:
        policy_seconds = torch.zeros_like(self.seconds)
        for rows, span in policy_spans:
            _share(policy_seconds, rows, span.seconds())
        masked = (canvas.editable & (self.ids == mask_id)).any(1)
        given = ~canvas.editable
        status: list[Status] = [
            "complete" if not left else "eos" if ended else "step_limit"
            for left, ended in zip(masked.tolist(), self.ended.tolist(), strict=True)
        ]
        return DecodeResult(
            ids=self.ids,
            start=canvas.start,
            seeds=canvas.seeds,
            num_steps=self.num_steps,
            idle_steps=self.idle_steps,
            stalled_steps=self.stalled_steps if count_stalls else torch.zeros_like(self.num_steps),
            policy_forwards=self.num_steps * forwards_per_step,
            seconds=self.seconds,
            policy_seconds=policy_seconds,
            status=status,
            num_forwards=self.num_forwards if session is None else session.num_forwards,
            num_refreshes=None
            if session is None
            else torch.tensor(session.num_refreshes, device=canvas.ids.device),
            given=given if bool(given[:, canvas.start :].any()) else None,
        )


def _share(total: Tensor, rows: Tensor, seconds: float) -> None:
    """Adds the time of a step, shared equally by the rows in it."""
    total.index_add_(0, rows, torch.full_like(rows, seconds / len(rows), dtype=total.dtype))
