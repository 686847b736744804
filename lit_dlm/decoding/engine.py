"""The one decode loop: the only place where a mask turns into a token.

Trace generation, benchmarks, rollouts and validation samples all go through :func:`decode`.
What differs between methods is in the plugs (window, quota, sampler, policy) and in the observers.
One step: window, forward, proposal, end-of-text gate, selection, cap, stall rule, end-of-text rule,
write.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from lit_dlm.backbones.base import Backbone
from lit_dlm.decoding.caches import CacheScheme, CacheSession
from lit_dlm.decoding.policies.base import CommitPolicy
from lit_dlm.decoding.sampler import Sampler
from lit_dlm.decoding.state import (
    Canvas,
    DecodeResult,
    DecodeState,
    Observer,
    Proposal,
    QueueObserver,
    Selection,
    Status,
    StepRecord,
    initial_state,
)
from lit_dlm.decoding.windows import Quota, Window, WindowView, masks_first
from lit_dlm.ops.batches import first_column, row_index
from lit_dlm.ops.options import at_least, of_kind
from lit_dlm.ops.precision import without_autocast
from lit_dlm.ops.sampling import top_quota


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """Engine options: step budget, end-of-text handling, stall rule. Recorded with every result."""

    max_steps: int | None = None
    """Most steps that a row may take; ``None``: one per mask, or as many as the window has or a
    policy that takes tokens back may need."""
    stall_rule: Literal["top1", "idle"] = "top1"
    """For a row without a commit: ``top1`` commits its best-scored candidate, ``idle`` commits
    nothing in this step (some releases then stop at the budget with masks left)."""
    eos_rule: Literal["none", "stop", "fill"] = "none"
    """Once an end of text is committed and no mask precedes it: ``stop`` ends the row and keeps the
    masks after it, ``fill`` ends the row and fills them with end of text, ``none`` continues. With
    given cells, only an end of text behind all of them counts."""
    eos_gate: bool = False
    """Until a row holds an end of text, commit one only when all its candidates propose one; not
    for the first cell of a block that only the refresh of a cache predicts (right shift)."""
    max_commits_per_step: int | None = None
    """Cap on the commits of a row in one step; those that the policy scores best are kept."""

    def __post_init__(self) -> None:
        at_least(1, max_steps=self.max_steps, max_commits_per_step=self.max_commits_per_step)
        if self.stall_rule == "idle" and self.max_steps is None:
            raise ValueError("max_steps: expected a number with stall_rule 'idle', got None")


class NotANumberError(ValueError):
    """Probabilities of a decode are not numbers; ``rows`` are the slots concerned."""

    def __init__(self, rows: list[int], *, step: int) -> None:
        super().__init__(
            f"the model's probabilities are not numbers at step {step} (rows {rows} of the batch); "
            "look at its weights and at the precision it computes in"
        )
        self.rows = rows


class Plugs:
    """The parts of a decoder that the loop uses."""

    window: Window  # where a step may commit
    quota: Quota  # how many cells it commits
    sampler: Sampler  # which tokens are proposed
    policy: CommitPolicy  # which of them become final
    cache: CacheScheme  # what steps take from earlier forwards
    settings: DecodeSettings

    @property
    def counts_blocks(self) -> bool:
        """Whether the quota or the policy reads the step and mask counts of a row's block."""
        return self.quota.counts_blocks or self.policy.counts_blocks

    def budget(self, num_masks: int) -> int:
        """Returns the most steps of a row with so many masks."""
        budget = max(self.policy.budget(num_masks), self.window.steps)
        return self.settings.max_steps or budget

    def begin(self, backbone: Backbone, canvas: Canvas) -> DecodeState:
        """Returns the state of a canvas before step 0."""
        state = initial_state(backbone.spec, canvas)
        dtype = getattr(torch, self.sampler.score_dtype)
        return replace(state, memory=self.policy.new_memory(state, backbone.vocab_size, dtype))


@torch.no_grad()
def decode(
    backbone: Backbone,
    source: Callable[[int], Canvas | None],
    plugs: Plugs,
    *,
    num_slots: int,
    observers: Sequence[QueueObserver] = (),
) -> Iterator[DecodeResult]:
    """Fills canvases row by row as slots become free (continuous batching).

    A row that has ended is replaced by the next one of the source or, if there is none, leaves the
    batch. The loop synchronises with the device once a step, for the leftmost mask of every row. A
    row's results depend neither on its slot nor on the other rows of the batch.

    Args:
        source: returns a canvas of as many rows as requested, or of fewer if no more are left, or
            ``None``. Its rows replace ended ones in the order of their slots; all responses have
            the same length.

    Yields:
        Whenever rows are replaced, the rows that have ended since the last result; at the end, all
        others. If an observer ends the decode, only those that have ended by then.
    """
    _, hidden_layers = needs(plugs.policy, observers)
    canvas = source(num_slots)
    if canvas is None:
        return
    has_more = len(canvas.ids) == num_slots
    batch = _Batch(backbone, canvas, plugs, hidden_layers)
    for observer in observers:
        observer.on_start(batch.state)
    # Half-precision weights compute in their own dtype: a trainer's autocast would only add casts.
    is_half = getattr(backbone, "dtype", torch.float32).itemsize == 2
    clock = time.perf_counter()
    while True:
        ended = batch.end_rows()
        if ended:
            canvas = source(len(ended)) if has_more else None
            replaced = ended[: 0 if canvas is None else len(canvas.ids)]
            has_more = len(replaced) == len(ended)
            if canvas is not None:
                result, entering = batch.refill(replaced, plugs.begin(backbone, canvas))
                for observer in observers:
                    observer.on_refill(result, entering)
                yield result
            elif len(ended) == len(batch.rows):
                break
            # Once the source is empty the batch shrinks: a row without work would still cost a row
            # in every later forward.
            if not has_more:
                batch.drop(ended[len(replaced) :])
            if canvas is not None:
                clock = time.perf_counter()  # filling a slot is not part of a method's time
                continue  # rows that have entered may have nothing to fill
        # Observers may require something else at every step.
        requires, _ = needs(plugs.policy, observers)
        with without_autocast(batch.state.ids.device) if is_half else nullcontext():
            decision = decide(
                backbone,
                replace(batch.state, frontier=tuple(batch.frontier)),
                plugs,
                requires=requires,
                hidden_layers=hidden_layers,
                session=batch.session,
            )
        # Nothing from here to the frontier may read a value from the device: the frontier is the
        # one transfer that the host waits for, and it comes after all launches of the step.
        looked = time.perf_counter()
        asked = [observer.on_step(decision.record) for observer in observers]
        clock += time.perf_counter() - looked  # nor are observers part of it
        batch.write(decision)
        now = time.perf_counter()
        batch.add_seconds(now - clock, decision.policy_span)
        clock = now
        if any(asked):
            batch.end_rows()
            break
    if not batch.ended:
        return
    result = batch.result()
    for observer in observers:
        observer.on_end(result)
    yield result


@dataclass(frozen=True)
class Decision:
    """What one step decides, before anything is written."""

    record: StepRecord  # the step as observers see it; its state has entered the window's block
    decided: Tensor  # (b,) bool: the policy decided; elsewhere the stall rule did
    wrote: Tensor  # (b, L) bool: cells that the step changes
    # (b,) bool: the end-of-text rule ends the row after this step; None without it
    ended: Tensor | None
    held: Tensor  # (b, L) bool: see :class:`DecodeState`
    policy_span: Span  # time that the policy took


def decide(
    backbone: Backbone,
    state: DecodeState,
    plugs: Plugs,
    *,
    requires: frozenset[str],
    hidden_layers: tuple[int, ...] = (),
    session: CacheSession | None = None,
) -> Decision:
    """Decides one step: window, forward, proposal, gate, selection, cap, stall and end rules.

    Verification by re-execution calls this too, so it repeats the loop itself and not a copy.
    """
    settings = plugs.settings
    view = plugs.window.view(state)
    state = enter_block(state, view, counts=plugs.counts_blocks)
    # The head runs only at the window's columns, unless the whole response is required.
    columns = view.columns
    if "region" in requires:
        region = torch.arange(state.start, state.ids.shape[1], device=columns.device)
        columns = region.expand(len(state.rows), -1)
    elif columns.device.type == "cpu" and "window" not in requires:
        columns = columns.gather(1, masks_first(state, columns))
    forced = None
    if session is not None:
        denoised, forced = session.denoise(state, columns)
    else:
        denoised = plugs.policy.denoise(backbone, state, columns, hidden_layers)
    plugs.sampler.restrict(denoised, backbone.spec)
    state, denoised = plugs.policy.remember(state, view.candidates, denoised)
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
    of_kind(selection, Selection, option="policy.select")
    if selection.rewritten is not None and not plugs.policy.takes_back:
        name = type(plugs.policy).__name__
        raise ValueError(f"policy: {name} rewrites cells; expected takes_back = True in it")
    new_ids, commit, decided = _written(state, candidates, proposal, selection, forced, settings)
    if selection.memory is not None:
        state = replace(state, memory=selection.memory)
    ended = None
    if settings.eos_rule != "none":
        fill = settings.eos_rule == "fill"
        new_ids, ended = _apply_eos_rule(state, new_ids, fill=fill, hold=selection.hold)
    held = torch.zeros_like(state.masked)
    if selection.hold is not None:
        held = held.scatter_(1, view.columns[:, :1], selection.hold[:, None])
    is_plain = selection.rewritten is None and ended is None
    record = StepRecord(
        state=state,
        proposal=proposal,
        candidates=candidates,
        commit=commit,
        scores=selection.scores,
        new_ids=new_ids,
        denoised=denoised if "logits" in requires else None,
    )
    wrote = commit if is_plain else new_ids != state.ids
    return Decision(record, decided, wrote, ended, held, policy_span)


def _written(
    state: DecodeState,
    candidates: Tensor,
    proposal: Proposal,
    selection: Selection,
    forced: Tensor | None,
    settings: DecodeSettings,
) -> tuple[Tensor, Tensor, Tensor]:
    """Applies cap, forced cells, stall rule, rewriting; returns canvas, commits and ``decided``."""
    # A policy may select more than the candidates; cap and stall rule see only candidates.
    commit = selection.commit & candidates
    if settings.max_commits_per_step is not None:
        commit = top_quota(selection.scores, commit, settings.max_commits_per_step)
    if forced is not None:
        commit = commit | forced
    decided = commit.any(1)
    if selection.rewritten is not None:
        decided = torch.ones_like(decided)
    # On the CPU, asking first costs less than the ranking, which is mostly not needed.
    if settings.stall_rule == "top1" and (decided.device.type != "cpu" or not bool(decided.all())):
        best = top_quota(selection.scores, candidates, 1)
        commit = torch.where(decided[:, None], commit, best)
    new_ids = torch.where(commit, proposal.ids, state.ids)
    if selection.rewritten is not None:
        new_ids = torch.where(state.standing, selection.rewritten, new_ids)
        commit = (new_ids != state.ids) & (new_ids == proposal.ids) & (new_ids != state.mask_id)
    return new_ids, commit, decided


_COMPLETE, _ENDED, _BROKEN = -1, -2, -3


def _frontier(masked: Tensor, ended: Tensor | None = None, prob: Tensor | None = None) -> list[int]:
    """Returns the leftmost mask of every row, negative if the row is done; waits for the device.

    This one transfer tells the host which rows are left and in which block each of them is, how the
    others ended, and which have a probability that is not a number.
    """
    has_masks, column = masked.view(torch.uint8).max(1)
    if ended is not None:
        column = column.masked_fill(ended, _ENDED)
    column = column.masked_fill(has_masks == 0, _COMPLETE)
    if prob is not None:
        column = column.masked_fill(prob.sum(1).isnan(), _BROKEN)
    return column.tolist()


_SCORES = ("prob", "entropy", "margin")
KNOWN = frozenset(
    ("hidden", "logits", "window", "region", "drawn", *_SCORES, *(f"raw_{s}" for s in _SCORES))
)
"""What policies and observers may require (see :class:`CommitPolicy`)."""


def needs(
    policy: CommitPolicy, observers: Sequence[Observer] = ()
) -> tuple[frozenset[str], tuple[int, ...]]:
    """Returns the names of what a step must compute (see :class:`CommitPolicy`), and the layers."""
    plugs: list[Any] = [policy, *observers]
    requires: frozenset[str] = frozenset().union(*(plug.requires for plug in plugs))
    if unknown := sorted(requires - KNOWN):
        raise ValueError(f"requires: expected some of {sorted(KNOWN)}, got {unknown[0]!r}")
    if "hidden" not in requires:
        return requires, ()
    asked = {tuple(plug.hidden_layers) for plug in plugs if "hidden" in plug.requires}
    if len(asked) != 1:
        raise ValueError(f"hidden_layers: policy and observers must agree, got {sorted(asked)}")
    return requires, asked.pop()


def enter_block(state: DecodeState, view: WindowView, *, counts: bool) -> DecodeState:
    """Enters the blocks of a window; ``counts`` restarts step and mask counts in new blocks."""
    if not counts:
        return replace(state, block=view.block, num_blocks=view.num_blocks, window=view.columns)
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
    other = candidates & ~torch.isin(proposals, state.eos_ids)
    keep_all = has_eos | ~other.any(1)
    return torch.where(keep_all[:, None], candidates, other)


def _apply_eos_rule(
    state: DecodeState, new_ids: Tensor, *, fill: bool, hold: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Ends rows that have an end of text with no mask before it, unless they are held."""
    columns = torch.arange(new_ids.shape[1], device=new_ids.device)
    given = (~state.editable & (columns >= state.start)).long() * columns
    is_eos = torch.isin(new_ids, state.eos_ids) & (columns > given.amax(1, keepdim=True))
    is_eos = is_eos & state.editable
    masked = state.editable & (new_ids == state.mask_id)
    before = columns < first_column(is_eos)[:, None]
    ended = is_eos.any(1) & ~(masked & before).any(1)
    if hold is not None:
        ended = ended & ~hold
    if fill:
        new_ids = torch.where(masked & ended[:, None], state.eos_ids[0], new_ids)
    return new_ids, ended


@dataclass(kw_only=True, eq=False)
class _Row:
    """What the host knows of a row; until it ends, counts are minus the batch's at its entry."""

    slot: int
    prompt_length: int
    budget: int
    num_steps: int
    seconds: float
    policy_seconds: float
    status: Status = "step_limit"


class _Batch:
    """The rows that are decoding, and the results of those that have ended."""

    def __init__(
        self, backbone: Backbone, canvas: Canvas, plugs: Plugs, hidden_layers: tuple[int, ...]
    ) -> None:
        self.state = plugs.begin(backbone, canvas)
        self.session = plugs.cache.start(
            backbone, self.state, window=plugs.window, hidden_layers=hidden_layers
        )
        # Leftmost mask of every row; negative where the row has ended
        self.frontier = _frontier(self.state.masked)
        self._plugs, self._pad_id = plugs, backbone.spec.pad_id
        self._num_steps = 0
        self._seconds = self._policy_seconds = 0.0  # of a row that was there from the start
        self._written = torch.zeros_like(self.state.rows)  # (b,) steps that wrote something
        self._decided = torch.zeros_like(self.state.rows)  # (b,) steps that the policy decided
        self.rows = self._entered(self.state, range(len(canvas.ids)))
        self.ended: list[_Row] = []  # that no result contains yet
        self._left: list[tuple[Tensor, ...]] = []

    def _entered(self, state: DecodeState, slots: Iterable[int]) -> list[_Row]:
        length = state.ids.shape[1] - state.start
        facts = torch.stack([state.masked.sum(1), state.positions[:, -1] + 1 - length], 1)
        return [
            _Row(
                slot=slot,
                prompt_length=prompt_length,
                budget=self._plugs.budget(num_masks),
                num_steps=-self._num_steps,
                seconds=-self._seconds,
                policy_seconds=-self._policy_seconds,
            )
            for slot, (num_masks, prompt_length) in zip(slots, facts.tolist(), strict=True)
        ]

    def write(self, decision: Decision) -> None:
        """Writes what a step decided and updates the counts; waits for the device."""
        record, state = decision.record, decision.record.state
        masked = state.editable & (record.new_ids == state.mask_id)
        self._num_steps += 1
        self._written += decision.wrote.any(1)
        self._decided += decision.decided
        self.state = replace(
            state,
            ids=record.new_ids,
            masked=masked,
            step=state.step + 1,
            block_step=state.block_step + self._plugs.counts_blocks,
            # Not only commits: also an end-of-text fill and what a policy takes back.
            written=decision.wrote,
            held=decision.held,
        )
        self.frontier = _frontier(self.state.unfinished, decision.ended, record.proposal.prob)
        broken = [row for row, column in enumerate(self.frontier) if column == _BROKEN]
        if broken:
            raise NotANumberError(state.rows[broken].tolist(), step=int(state.step[broken[0]]))

    def add_seconds(self, seconds: float, policy_span: Span) -> None:
        """Divides the time of a finished step equally among its rows."""
        self._seconds += seconds / len(self.rows)
        self._policy_seconds += policy_span.seconds() / len(self.rows)

    def end_rows(self) -> list[int]:
        """Stores the results of rows that are done or out of steps; returns the rows' numbers."""
        ended = [
            number
            for number, (row, column) in enumerate(zip(self.rows, self.frontier, strict=True))
            if column < 0 or self._num_steps + row.num_steps >= row.budget
        ]
        if not ended:
            return ended
        # Stored before any row moves, which changes slots and columns.
        index = row_index(ended, self.state.ids.device)
        state = self.state
        parts = (state.ids, state.editable, state.seeds, self._written, self._decided)
        self._left.append(tuple(part[index] for part in parts))
        for number in ended:
            row = self.rows[number]
            row.num_steps += self._num_steps
            row.seconds += self._seconds
            row.policy_seconds += self._policy_seconds
            row.status = _STATUS.get(self.frontier[number], "step_limit")
            self.ended.append(row)
        return ended

    def refill(
        self, replaced: list[int], entering: DecodeState
    ) -> tuple[DecodeResult, DecodeState]:
        """Replaces ended rows; returns the result of all that have ended, and the new rows."""
        result = self.result()
        ended, self.ended, self._left = self.ended, [], []
        slots = [self.rows[number].slot for number in replaced]
        for number, row in zip(replaced, self._entered(entering, slots), strict=True):
            self.rows[number] = row
        self._written[replaced] = 0
        self._decided[replaced] = 0
        # For prompts of other lengths the canvas grows on the left, or shrinks if at least an
        # eighth of it would be padding in every row. All columns known on the host move with it.
        by = max(row.prompt_length for row in self.rows if row not in ended) - self.state.start
        by = by if by > 0 or -8 * by >= self.state.ids.shape[1] else 0
        index = row_index(replaced, self.state.ids.device)
        state = self.state.shifted(by, pad_id=self._pad_id)
        entering = entering.shifted(state.start - entering.start, pad_id=self._pad_id)
        entering = replace(entering, rows=state.rows[index])
        if state.pad_mask is not None or entering.pad_mask is not None:
            state, entering = (
                replace(one, pad_mask=torch.ones_like(one.masked)) if one.pad_mask is None else one
                for one in (state, entering)
            )
        self.state = state.put(index, entering)
        if self.session is not None:
            self.session.put(replaced, self.state, by=by)
        self.frontier = [column + by for column in self.frontier]
        for number, column in zip(replaced, _frontier(entering.masked), strict=True):
            self.frontier[number] = column
        return result, entering

    def drop(self, ended: list[int]) -> None:
        kept = [number for number in range(len(self.rows)) if number not in set(ended)]
        index = row_index(kept, self.state.ids.device)
        self.state = self.state.take(index)
        self._written, self._decided = self._written[index], self._decided[index]
        if self.session is not None:
            self.session.take(kept, index)
        self.rows = [self.rows[number] for number in kept]
        self.frontier = [self.frontier[number] for number in kept]

    def result(self) -> DecodeResult:
        """Returns the result of the rows that have ended, in the order of their slots."""
        order = sorted(range(len(self.ended)), key=lambda number: self.ended[number].slot)
        rows = [self.ended[number] for number in order]
        device = self.state.ids.device
        index = row_index(order, device)
        ids, editable, seeds, written, decided = (
            torch.cat(parts)[index] for parts in zip(*self._left, strict=True)
        )
        num_steps = torch.tensor([row.num_steps for row in rows], device=device)
        has_stalls = self._plugs.settings.stall_rule == "top1"
        start, session = self.state.start, self.session
        return DecodeResult(
            ids=ids,
            rows=[row.slot for row in rows],
            start=start,
            seeds=seeds,
            num_steps=num_steps,
            idle_steps=num_steps - written,
            stalled_steps=num_steps - decided if has_stalls else torch.zeros_like(num_steps),
            policy_forwards=num_steps * self._plugs.policy.forwards_per_step,
            seconds=torch.tensor([row.seconds for row in rows], dtype=torch.float64),
            policy_seconds=torch.tensor([row.policy_seconds for row in rows], dtype=torch.float64),
            status=[row.status for row in rows],
            num_forwards=self._num_steps if session is None else session.num_forwards,
            given=~editable,
        )


_STATUS: dict[int, Status] = {_COMPLETE: "complete", _ENDED: "eos"}


class Span:
    """Measures the seconds between entering and leaving a ``with`` block.

    On a CPU this is a clock; on CUDA, two events in the stream, so that the work is timed and not
    its launch, and nothing waits until :meth:`seconds` is called.
    """

    def __init__(self, device: torch.device) -> None:
        count = 2 if device.type == "cuda" else 0
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
        self._clock = 0.0

    def __enter__(self) -> Span:
        if self._events:
            self._events[0].record()
        self._clock = time.perf_counter()
        return self

    def __exit__(self, *exception: object) -> None:
        self._clock = time.perf_counter() - self._clock
        if self._events:
            self._events[1].record()

    def seconds(self) -> float:
        """Returns the time; on CUDA this waits for the end of the block."""
        if not self._events:
            return self._clock
        start, end = self._events
        end.synchronize()
        return start.elapsed_time(end) / 1e3
