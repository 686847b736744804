"""The one decode loop: the only place where a mask turns into a token.

Trace generation, benchmarks, rollouts and validation samples all go through :func:`decode_queue`,
one batch of them through :func:`decode`. What differs between methods is in the plugs (window,
quota, sampler, policy) and in the observers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor

from lit_dlm.backbones.base import Backbone, Denoised
from lit_dlm.decoding.caches import CacheScheme, CacheSession
from lit_dlm.decoding.guidance import GuidedBackbone
from lit_dlm.decoding.observers import Observer, QueueObserver
from lit_dlm.decoding.policies.base import CommitPolicy
from lit_dlm.decoding.quotas import Quota
from lit_dlm.decoding.sampler import Sampler
from lit_dlm.decoding.state import Canvas, DecodeResult, DecodeState, Status, StepRecord
from lit_dlm.decoding.windows import Window, WindowView, check_window, first_column, masks_first
from lit_dlm.ops.options import at_least
from lit_dlm.ops.precision import without_autocast
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
        at_least(1, max_steps=self.max_steps, max_commits_per_step=self.max_commits_per_step)
        if self.stall_rule == "idle" and self.max_steps is None:
            raise ValueError("max_steps: expected a number with stall_rule 'idle', got None")


@dataclass(frozen=True, kw_only=True)
class Plugs:
    """What a decode is made of."""

    window: Window
    """Where a step may commit."""
    quota: Quota
    """How many cells it commits."""
    sampler: Sampler
    """Which tokens are proposed."""
    policy: CommitPolicy
    """Which of them become final."""
    cache: CacheScheme
    """What steps take from earlier forwards."""
    settings: DecodeSettings


class NotANumberError(ValueError):
    """Probabilities of a decode are not numbers; ``rows`` says where in the batch."""

    def __init__(self, rows: list[int], *, step: int) -> None:
        super().__init__(
            f"the model's probabilities are not numbers at step {step} (rows {rows} of the batch); "
            "look at its weights and at the precision it computes in"
        )
        self.rows = rows


def decode(
    backbone: Backbone,
    canvas: Canvas,
    plugs: Plugs,
    *,
    observers: Sequence[Observer] = (),
) -> DecodeResult:
    """Fills the masks of a canvas: :func:`decode_queue` of one batch."""
    waiting = [canvas]
    (result,) = decode_queue(
        backbone,
        lambda _slots: waiting.pop() if waiting else None,
        plugs,
        num_slots=len(canvas.ids),
        observers=cast(Sequence[QueueObserver], observers),  # no row is replaced
    )
    return result


@torch.no_grad()
def decode_queue(
    backbone: Backbone,
    source: Callable[[int], Canvas | None],
    plugs: Plugs,
    *,
    num_slots: int,
    observers: Sequence[QueueObserver] = (),
) -> Iterator[DecodeResult]:
    """Fills canvases row by row as slots become free (continuous batching).

    One step: window, forward, proposal, selection, then the gate, the cap and the stall rule, then
    the write. A row that has ended is replaced by the next one of the source, if there is one, else
    it leaves the batch. The loop synchronises with the device once a step, for the leftmost mask of
    every row. What a row gets depends neither on its slot nor on the rows beside it.

    Args:
        source: gives as many rows as it is asked for, or fewer, down to ``None``, where it has no
            more; it is not asked again then. Its rows succeed to ended ones in the order of slots.
            All canvases have equally long responses.

    Yields:
        The rows that have ended since, whenever some are replaced; at the end all that are left.
    """
    policy = plugs.policy
    check_window(plugs.window, backbone.spec)
    _, hidden_layers = needs(policy, observers)
    canvas = source(num_slots)
    if canvas is None:
        return
    has_more = len(canvas.ids) == num_slots
    state = initial_state(backbone, canvas)
    session = plugs.cache.start(backbone, state, window=plugs.window, hidden_layers=hidden_layers)
    tally = _Tally(state, plugs.settings, forwards_per_step=policy.forwards_per_step)
    for observer in observers:
        observer.on_start(state)
    # Such weights compute in their own dtype: a trainer's autocast has nothing for them but casts.
    is_half = getattr(backbone, "dtype", torch.float32).itemsize == 2
    frontier = _frontier(state.masked)
    clock = time.perf_counter()
    while True:
        ended = [row for row, column in enumerate(frontier) if column < 0 or tally.is_spent(row)]
        if ended:
            # Kept before any row moves: slots and columns below change under them.
            tally.end(state, ended, frontier, session)
            canvas = source(len(ended)) if has_more else None
            replaced = ended[: 0 if canvas is None else len(canvas.ids)]
            has_more = len(replaced) == len(ended)
            if canvas is None and len(ended) == len(frontier):
                break
            if canvas is not None:
                result = tally.result(session)
                entering = initial_state(backbone, canvas)
                # Prompts of other lengths: the canvas grows or shrinks on the left, so every
                # column that is known on the host moves with it.
                by = tally.replace(replaced, entering)
                state, entering = _refilled(state, replaced, entering, by, backbone.spec.pad_id)
                if session is not None:
                    session.put(replaced, state, by=by)
                frontier = [column + by for column in frontier]
                for row, column in zip(replaced, _frontier(entering.masked), strict=True):
                    frontier[row] = column
                for observer in observers:
                    observer.on_refill(result, entering)
                yield result
            # Once the source is empty the batch shrinks: a row without work would cost a row of
            # every forward that follows.
            if not has_more:
                gone = set(ended[len(replaced) :])
                kept = [row for row in range(len(frontier)) if row not in gone]
                index = torch.tensor(kept).to(state.ids.device, non_blocking=True)
                state = state.take(index)
                tally.take(kept, index)
                if session is not None:
                    session.take(kept, index)
                frontier = [frontier[row] for row in kept]
            if canvas is not None:
                clock = time.perf_counter()  # filling a slot is no part of a method's time
                continue  # rows that have entered may have nothing to fill
        state = replace(state, frontier=tuple(frontier))
        with without_autocast(state.ids.device) if is_half else nullcontext():
            decision = decide(
                backbone,
                state,
                plugs,
                requires=needs(policy, observers)[0],
                hidden_layers=hidden_layers,
                session=session,
            )
        # Nothing from here to the frontier may read a value: that one transfer is what the host
        # waits for, and it comes after all launches of the step.
        record = decision.record
        state, new_ids = record.state, record.new_ids
        looked = time.perf_counter()
        for observer in observers:
            observer.on_step(record)
        clock += time.perf_counter() - looked  # nor are observers
        masked = state.editable & (new_ids == state.mask_id)
        tally.add(record.commit, decision.decided)
        state = replace(
            state,
            ids=new_ids,
            masked=masked,
            step=state.step + 1,
            block_step=state.block_step + 1 if plugs.quota.counts_blocks else state.block_step,
            # An end-of-text fill writes cells that no policy committed.
            written=record.commit if decision.ended is None else new_ids != state.ids,
        )
        frontier = _frontier(masked, decision.ended, record.proposal.prob)
        if _BROKEN in frontier:
            broken = [row for row, column in enumerate(frontier) if column == _BROKEN]
            step = int(state.step[broken[0]]) - 1
            raise NotANumberError(state.rows[broken].tolist(), step=step)
        now = time.perf_counter()
        tally.add_seconds(now - clock, decision.policy_span)
        clock = now
    result = tally.result(session)
    for observer in observers:
        observer.on_end(result)
    yield result


def _refilled(
    state: DecodeState, replaced: list[int], entering: DecodeState, by: int, pad_id: int
) -> tuple[DecodeState, DecodeState]:
    """The state with some rows replaced, and the state of the new rows alone."""
    index = torch.tensor(replaced).to(state.ids.device, non_blocking=True)
    state = state.shifted(by, pad_id=pad_id)
    entering = entering.shifted(state.start - entering.start, pad_id=pad_id)
    entering = replace(entering, rows=state.rows[index])
    masks = [state.pad_mask, entering.pad_mask]
    if any(mask is not None for mask in masks):
        state, entering = (
            replace(one, pad_mask=torch.ones_like(one.masked)) if one.pad_mask is None else one
            for one in (state, entering)
        )
    return state.put(index, entering), entering


@dataclass(frozen=True)
class Decision:
    """What one step decides, before anything is written."""

    record: StepRecord
    """The step as observers see it; its state has entered the window's block."""
    decided: Tensor
    """``(b,)`` bool: the policy committed something; where not, the stall rule decided."""
    ended: Tensor | None
    """``(b,)`` bool: the end-of-text rule ends the row after this step; ``None`` without one."""
    policy_span: Span | None = None
    """Time that the policy took; ``None`` where no policy decided."""


def decide(
    backbone: Backbone,
    state: DecodeState,
    plugs: Plugs,
    *,
    requires: frozenset[str],
    hidden_layers: tuple[int, ...] = (),
    session: CacheSession | None = None,
) -> Decision:
    """One step of the loop: window, forward, proposal, selection, gate, cap, stall and end rules.

    Both :func:`decode` and verification by re-execution take their decisions here, so the second
    repeats the first and not a copy of it.

    Args:
        session: the cache of the decode, which this step reads and writes; ``None`` without one.
    """
    settings = plugs.settings
    view = plugs.window.view(state)
    state = enter_block(state, view, counts=plugs.quota.counts_blocks)
    # The head runs at the window's columns alone, unless somebody reads the whole response.
    columns = view.columns
    if "region" in requires:
        region = torch.arange(state.start, state.ids.shape[1], device=columns.device)
        columns = region.expand(len(state.rows), -1)
    elif columns.device.type == "cpu":
        columns = columns.gather(1, masks_first(state, columns))
    forced = None
    if session is None:
        denoised = _denoise(backbone, state, columns, hidden_layers)
    else:
        denoised, forced = session.denoise(state, columns)
    plugs.sampler.restrict(denoised, backbone.spec)
    proposal = plugs.sampler.propose(state, denoised, requires)
    # The gate comes before the policy, which then spends its quota on what may be committed.
    candidates = view.candidates
    if settings.eos_gate:
        candidates = end_of_text_gate(state, candidates, proposal.ids)
    if forced is not None:  # cells that only the refresh of a cache can predict
        candidates = torch.where(forced.any(1, keepdim=True), forced, candidates)
    counts = plugs.quota.counts(state, view.candidates)
    with Span(state.ids.device) as policy_span:
        selection = plugs.policy.select(state, candidates, proposal, counts)
    # A policy may ask for more than it was offered; cap and stall rule see what is left of it.
    commit = selection.commit & candidates
    if settings.max_commits_per_step is not None:
        commit = top_quota(selection.scores, commit, settings.max_commits_per_step)
    if forced is not None:
        commit = commit | forced
    decided = commit.any(1)
    # On the CPU the question costs less than the ranking that it mostly saves.
    if settings.stall_rule == "top1" and (decided.device.type != "cpu" or not bool(decided.all())):
        best = top_quota(selection.scores, candidates, 1)
        commit = torch.where(decided[:, None], commit, best)
    new_ids = torch.where(commit, proposal.ids, state.ids)
    ended = None
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
    return Decision(record, decided, ended, policy_span)


def _denoise(
    backbone: Backbone, state: DecodeState, columns: Tensor, hidden_layers: tuple[int, ...]
) -> Denoised:
    """One forward over the whole canvas."""
    # Only block models and guidance ask where the response begins.
    asks = backbone.spec.attention == "block" or isinstance(backbone, GuidedBackbone)
    origin = {"response_start": state.start} if asks else {}
    return backbone.denoise(
        state.ids, pad_mask=state.pad_mask, columns=columns, hidden_layers=hidden_layers, **origin
    )


_COMPLETE, _ENDED, _BROKEN = -1, -2, -3


def _frontier(masked: Tensor, ended: Tensor | None = None, prob: Tensor | None = None) -> list[int]:
    """The leftmost mask of every row, negative where it is done: the loop waits here.

    One transfer tells how many rows are left, which ones, how the others ended, in which block
    each of them is, and which have a probability that is not a number.
    """
    has_masks, column = masked.view(torch.uint8).max(1)
    if ended is not None:
        column = column.masked_fill(ended, _ENDED)
    column = column.masked_fill(has_masks == 0, _COMPLETE)
    if prob is not None:
        column = column.masked_fill(prob.sum(1).isnan(), _BROKEN)
    return column.tolist()


def needs(
    policy: CommitPolicy, observers: Sequence[Observer] = ()
) -> tuple[frozenset[str], tuple[int, ...]]:
    """What a step must compute for a policy and observers.

    Returns:
        Names (see :class:`CommitPolicy`) and the hidden layers that all agree on.
    """
    requires = policy.requires.union(*(observer.requires for observer in observers))
    return requires, _hidden_layers([policy, *observers]) if "hidden" in requires else ()


def initial_state(backbone: Backbone, canvas: Canvas) -> DecodeState:
    """The state before step 0."""
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
        step=zeros,
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


def enter_block(state: DecodeState, view: WindowView, *, counts: bool) -> DecodeState:
    """Starts the count of steps and masks in rows that came into a new block, if one is wanted."""
    if not counts:
        return replace(state, block=view.block, num_blocks=view.num_blocks)
    entered = view.block != state.block
    return replace(
        state,
        block=view.block,
        block_step=state.block_step.masked_fill(entered, 0),
        block_masks=torch.where(entered, view.candidates.sum(1), state.block_masks),
        num_blocks=view.num_blocks,
    )


def end_of_text_gate(state: DecodeState, candidates: Tensor, proposals: Tensor) -> Tensor:
    """``(b, L)`` bool candidates without ends of text, in rows that hold no end of text yet.

    A row all of whose candidates propose an end of text keeps them.
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
    """Counts of the rows in every slot, and what the rows that have ended leave behind."""

    def __init__(
        self, state: DecodeState, settings: DecodeSettings, *, forwards_per_step: int
    ) -> None:
        zeros = torch.zeros_like(state.rows)
        self._written, self._decided = zeros, zeros.clone()  # (b,) steps
        self._settings, self._forwards_per_step = settings, forwards_per_step
        self._num_steps = 0
        self._seconds = self._policy_seconds = 0.0  # of a row that were there all the time
        self._rows = self._entered(state, range(len(state.rows)))
        self._ended: list[_EndedRow] = []
        self._left: list[tuple[DecodeState, Tensor, Tensor]] = []

    def _entered(self, state: DecodeState, slots: Iterable[int]) -> list[_Row]:
        length = state.ids.shape[1] - state.start
        facts = torch.stack([state.masked.sum(1), state.positions[:, -1] + 1 - length], 1)
        return [
            _Row(
                slot=slot,
                prompt_length=prompt_length,
                budget=self._settings.max_steps or num_masks,
                first_step=self._num_steps,
                seconds=self._seconds,
                policy_seconds=self._policy_seconds,
            )
            for slot, (num_masks, prompt_length) in zip(slots, facts.tolist(), strict=True)
        ]

    def is_spent(self, row: int) -> bool:
        """Whether a row of the batch has had all its steps."""
        return self._num_steps - self._rows[row].first_step >= self._rows[row].budget

    def add(self, commit: Tensor, decided: Tensor) -> None:
        """Counts a step."""
        self._num_steps += 1
        self._written += commit.any(1)
        self._decided += decided

    def add_seconds(self, seconds: float, policy_span: Span | None) -> None:
        """Shares the time of a step, for whose end the host has waited."""
        self._seconds += seconds / len(self._rows)
        if policy_span is not None:
            self._policy_seconds += policy_span.seconds() / len(self._rows)

    def end(
        self,
        state: DecodeState,
        ended: Sequence[int],
        frontier: Sequence[int],
        session: CacheSession | None,
    ) -> None:
        """Keeps rows that have ended."""
        index = torch.tensor(ended).to(state.ids.device, non_blocking=True)
        self._left.append((state.take(index), self._written[index], self._decided[index]))
        for row in ended:
            begun = self._rows[row]
            self._ended.append(
                _EndedRow(
                    slot=begun.slot,
                    num_steps=self._num_steps - begun.first_step,
                    seconds=self._seconds - begun.seconds,
                    policy_seconds=self._policy_seconds - begun.policy_seconds,
                    status=_STATUS.get(frontier[row], "step_limit"),
                    num_refreshes=0 if session is None else session.num_refreshes[row],
                )
            )

    def take(self, kept: Sequence[int], index: Tensor) -> None:
        """The other rows leave the batch."""
        self._rows = [self._rows[row] for row in kept]
        self._written, self._decided = self._written[index], self._decided[index]

    def replace(self, replaced: Sequence[int], entering: DecodeState) -> int:
        """Rows enter.

        Returns:
            By how many columns the batch should grow on the left to hold their prompts, or shrink
            where an eighth of it at least would be padding in every row.
        """
        start, length = self._left[-1][0].start, self._left[-1][0].ids.shape[1]
        slots = [self._rows[row].slot for row in replaced]
        for row, one in zip(replaced, self._entered(entering, slots), strict=True):
            self._rows[row] = one
        self._written[replaced] = 0
        self._decided[replaced] = 0
        self._left = []
        gone = {one.slot for one in self._ended} - set(slots)
        self._ended = []
        needed = max(one.prompt_length for one in self._rows if one.slot not in gone)
        by = needed - start
        return by if by > 0 or -8 * by >= length else 0

    def result(self, session: CacheSession | None) -> DecodeResult:
        """The result of the rows that have ended."""
        last = self._left[-1][0]
        device = last.ids.device
        order = sorted(range(len(self._ended)), key=lambda number: self._ended[number].slot)
        ended = [self._ended[number] for number in order]
        index = torch.tensor(order).to(device, non_blocking=True)

        def joined(name: str) -> Tensor:
            return torch.cat([getattr(one, name) for one, _, _ in self._left])[index]

        given = ~joined("editable")
        num_steps = torch.tensor([one.num_steps for one in ended], device=device)
        count_stalls = self._settings.stall_rule == "top1"
        return DecodeResult(
            ids=joined("ids"),
            rows=[one.slot for one in ended],
            start=last.start,
            seeds=joined("seeds"),
            num_steps=num_steps,
            idle_steps=num_steps - torch.cat([written for _, written, _ in self._left])[index],
            stalled_steps=num_steps - torch.cat([decided for *_, decided in self._left])[index]
            if count_stalls
            else torch.zeros_like(num_steps),
            policy_forwards=num_steps * self._forwards_per_step,
            seconds=_float64([one.seconds for one in ended]),
            policy_seconds=_float64([one.policy_seconds for one in ended]),
            status=[one.status for one in ended],
            num_forwards=self._num_steps if session is None else session.num_forwards,
            num_refreshes=None
            if session is None
            else torch.tensor([one.num_refreshes for one in ended], device=device),
            given=given if bool(given[:, last.start :].any()) else None,
        )


_STATUS: dict[int, Status] = {_COMPLETE: "complete", _ENDED: "eos"}


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A row in the batch, and the counts of the loop when it entered."""

    slot: int
    prompt_length: int
    budget: int
    first_step: int
    seconds: float
    policy_seconds: float


@dataclass(frozen=True, kw_only=True)
class _EndedRow:
    slot: int
    num_steps: int
    seconds: float
    policy_seconds: float
    status: Status
    num_refreshes: int


def _float64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class Span:
    """Seconds between entering and leaving a ``with`` block.

    On a CPU a clock; on CUDA two events in the stream, so that what is timed is the work and not
    its launch, and nothing waits before :meth:`seconds` is asked.
    """

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = (
                torch.cuda.Event(enable_timing=True),
                torch.cuda.Event(enable_timing=True),
            )
        self._clock = 0.0

    def __enter__(self) -> Span:
        if self._events is not None:
            self._events[0].record()
        self._clock = time.perf_counter()
        return self

    def __exit__(self, *exception: object) -> None:
        self._clock = time.perf_counter() - self._clock
        if self._events is not None:
            self._events[1].record()

    def seconds(self) -> float:
        """The time; on CUDA this waits for the end of the block."""
        if self._events is None:
            return self._clock
        start, end = self._events
        end.synchronize()
        return start.elapsed_time(end) / 1e3
