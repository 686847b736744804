"""The one decode loop: the only place where a mask turns into a token.

Trace generation, benchmarks, rollouts and validation samples all go through :func:`decode`.
What differs between methods is in the plugs (window, quota, sampler, policy) and in the observers.
One step: window, forward, proposal, end-of-text gate, selection, cap, stall rule, end-of-text rule,
write.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from lit_dlm.backbones.base import Backbone
from lit_dlm.decoding.caches import CacheScheme, Forwards
from lit_dlm.decoding.policies.base import CommitPolicy
from lit_dlm.decoding.sampler import Sampler
from lit_dlm.decoding.state import (
    BROKEN,
    COMPLETE,
    EOS,
    RUNNING,
    STEP_LIMIT,
    Canvas,
    DecodeResult,
    DecodeState,
    Observer,
    QueueObserver,
    Selection,
    Status,
    StepRecord,
    initial_state,
)
from lit_dlm.decoding.windows import Quota, Window, WindowView, masks_first
from lit_dlm.ops.batches import first_column, reads_are_free, row_index
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

    def budget(self, num_masks: int) -> int:
        """Returns the most steps of a row with so many masks."""
        budget = max(self.policy.budget(num_masks), self.window.steps)
        return self.settings.max_steps or budget

    def begin(self, backbone: Backbone, canvas: Canvas) -> DecodeState:
        """Returns the state of a canvas before step 0."""
        state = initial_state(backbone.spec, canvas)
        budgets = [self.budget(number) for number in state.masked.sum(1).tolist()]
        dtype = getattr(torch, self.sampler.score_dtype)
        return replace(
            state,
            budget=row_index(budgets, state.ids.device),
            memory=self.policy.new_memory(state, backbone.vocab_size, dtype),
        )


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
    batch. The host waits for the device once a step, to look where rows are and which have ended. A
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
    has_more, is_stopped = len(canvas.ids) == num_slots, False
    batch = Batch(backbone, canvas, plugs, hidden_layers)
    for observer in observers:
        observer.on_start(batch.state)
    batch.look()
    clock = time.perf_counter()
    while True:
        ended = batch.end_rows()
        if is_stopped:
            break
        if ended:
            canvas = source(len(ended)) if has_more else None
            num_new = 0 if canvas is None else len(canvas.ids)
            has_more = num_new == len(ended)
            if canvas is not None:
                result, entering = batch.refill(ended[:num_new], canvas)
                for observer in observers:
                    observer.on_refill(result, entering)
                yield result
            elif len(ended) == len(batch.rows):
                break
            # Once the source is empty the batch shrinks: a row without work would still cost a row
            # in every later forward.
            if not has_more:
                batch.drop(ended[num_new:])
            if canvas is not None:
                batch.look()  # rows that have entered may have nothing to fill
                clock = time.perf_counter()  # filling a slot is not part of a method's time
                continue
        # Observers may require something else at every step.
        requires, _ = needs(plugs.policy, observers)
        batch.prepare()
        record = batch.step(requires)
        # Nothing from here to the look may read a value from the device: the look is the one
        # transfer that the host waits for, and it comes after all launches of the step.
        watched = time.perf_counter()
        answers = [observer.on_step(record) for observer in observers]  # all are called
        is_stopped = any(answers)
        clock += time.perf_counter() - watched  # nor are observers part of it
        batch.look()
        now = time.perf_counter()
        batch.add_seconds(now - clock)
        clock = now
    if batch.has_ended_rows:
        result = batch.result()
        for observer in observers:
            observer.on_end(result)
        yield result


@dataclass(frozen=True)
class Decision:
    """What one step decides, before anything is written."""

    record: StepRecord  # the step as observers see it; its state has entered the window's block
    by_policy: Tensor  # (b,) bool: the policy decided; elsewhere the stall rule did
    # (b,) bool: the end-of-text rule ends the row after this step; None without it
    ended: Tensor | None
    held: Tensor  # (b, L) bool: see :class:`DecodeState`


def decide(
    state: DecodeState,
    plugs: Plugs,
    forwards: Forwards,
    *,
    requires: frozenset[str],
    policy_timer: AbstractContextManager[object] | None = None,
) -> Decision:
    """Decides one step of all rows; nothing in it waits for a GPU.

    Verification by re-execution calls this too, so it repeats the loop itself and not a copy.
    """
    policy, sampler, rules = plugs.policy, plugs.sampler, plugs.settings
    # 1. The window: where a row may write now.
    view = plugs.window.view(state)
    state, candidates = enter_block(state, view), view.candidates
    # 2. The forward, of the window's columns. What the policy remembers may change the logits.
    columns = columns_to_predict(state, view, requires)
    denoised, forced = forwards.denoise(state, columns)
    sampler.restrict(denoised, forwards.backbone.spec)
    state, denoised = policy.remember(state, candidates, denoised)
    # 3. The proposal: a token for each column, and how probable it is.
    proposal = sampler.propose(state, denoised, requires)
    # 4. What may be committed, and how much: the quota counts all candidates of the window. The
    #    gate comes before the policy, which then spends its quota on what may be committed.
    counts = plugs.quota.counts(state, candidates)
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
    commit, by_policy = committed(candidates, selection, forced, rules)
    # 6. The canvas after the step: commits, what the policy rewrites, the end of the text.
    new_ids = torch.where(commit, proposal.ids, state.ids)
    if selection.rewritten is not None:
        new_ids = torch.where(state.standing, selection.rewritten, new_ids)
        commit = (new_ids != state.ids) & (new_ids == proposal.ids) & (new_ids != state.mask_id)
    held, ended = torch.zeros_like(state.masked), None
    if selection.hold is not None:
        held = held.scatter_(1, view.columns[:, :1], selection.hold[:, None])
    if rules.eos_rule != "none":
        ended = text_ends(state, new_ids)
        if selection.hold is not None:
            ended = ended & ~selection.hold
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
    return Decision(record, by_policy, ended, held)


def advance(decision: Decision, *, new_ids: Tensor | None = None) -> DecodeState:
    """Returns the state before the next step.

    ``new_ids`` ``(b, L)`` take the place of the step's own, where a record says what it wrote.
    """
    record, state = decision.record, decision.record.state
    ids = record.new_ids if new_ids is None else new_ids
    # Not only commits: also an end-of-text fill and what a policy takes back.
    written = ids != state.ids
    masked = state.editable & (ids == state.mask_id)
    step = state.step + 1
    # Of several reasons to end, the last one below is the row's: a broken row is never complete,
    # and a row that has no masks left is, whatever ended it.
    status = (step >= state.budget) * STEP_LIMIT
    if decision.ended is not None:
        status = status.masked_fill(decision.ended, EOS)
    status = status.masked_fill(~(masked | decision.held).any(1), COMPLETE)
    status = status.masked_fill(record.proposal.prob.sum(1).isnan(), BROKEN)
    return replace(
        state,
        ids=ids,
        masked=masked,
        step=step,
        status=status,
        block_step=state.block_step + 1,
        written=written,
        held=decision.held,
        num_wrote=state.num_wrote + written.any(1),
        num_decided=state.num_decided + decision.by_policy,
    )


def columns_to_predict(state: DecodeState, view: WindowView, requires: frozenset[str]) -> Tensor:
    """``(b, K)`` int64 columns that go through the head: the window's, or the whole response."""
    columns = view.columns
    if "region" in requires:
        region = torch.arange(state.start, state.ids.shape[1], device=columns.device)
        return region.expand(len(state.rows), -1)
    if reads_are_free(columns.device) and "window" not in requires:
        return columns.gather(1, masks_first(state, columns))
    return columns


def committed(
    candidates: Tensor, selection: Selection, forced: Tensor | None, rules: DecodeSettings
) -> tuple[Tensor, Tensor]:
    """Applies cap, forced cells and stall rule; ``(b, L)`` commits and ``(b,)`` ``by_policy``."""
    # A policy may select more than the candidates; cap and stall rule see only candidates.
    commit = selection.commit & candidates
    if rules.max_commits_per_step is not None:
        commit = top_quota(selection.scores, commit, rules.max_commits_per_step)
    if forced is not None:
        commit = commit | forced
    by_policy = commit.any(1)
    if selection.rewritten is not None:  # such a policy ensures progress itself
        by_policy = torch.ones_like(by_policy)
    # Asking first costs less than the ranking, which is mostly not needed.
    is_needed = not reads_are_free(by_policy.device) or not bool(by_policy.all())
    if rules.stall_rule == "top1" and is_needed:
        best = top_quota(selection.scores, candidates, 1)
        commit = torch.where(by_policy[:, None], commit, best)
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


def enter_block(state: DecodeState, view: WindowView) -> DecodeState:
    """Enters the blocks of a window; the counts of steps and masks restart in new blocks."""
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


def text_ends(state: DecodeState, new_ids: Tensor) -> Tensor:
    """``(b,)`` bool: rows with an end of text behind all given cells and no mask before it."""
    columns = torch.arange(new_ids.shape[1], device=new_ids.device)
    given = (~state.editable & (columns >= state.start)).long() * columns
    is_eos = torch.isin(new_ids, state.eos_ids) & (columns > given.amax(1, keepdim=True))
    is_eos = is_eos & state.editable
    masked = state.editable & (new_ids == state.mask_id)
    before = columns < first_column(is_eos)[:, None]
    return is_eos.any(1) & ~(masked & before).any(1)


@dataclass(kw_only=True)
class Row:
    """What the host knows of a row: its slot, and the batch's clocks when it entered."""

    slot: int
    prompt_length: int
    seconds: float
    policy_seconds: float


_STATUS: dict[int, Status] = {COMPLETE: "complete", EOS: "eos", STEP_LIMIT: "step_limit"}


class Batch:
    """The rows that are decoding, and the results of those that have ended.

    Steps change only ``state``. The host knows of it what it saw at the last :meth:`look`.
    """

    def __init__(
        self, backbone: Backbone, canvas: Canvas, plugs: Plugs, hidden_layers: tuple[int, ...]
    ) -> None:
        self.state = plugs.begin(backbone, canvas)
        self.first_mask: list[int] = []
        """The leftmost unfinished column of every row, at the last look."""
        self.status: list[int] = []
        """The status of every row, at the last look."""
        self._backbone, self._plugs = backbone, plugs
        self._forwards = plugs.cache.start(
            backbone,
            self.state,
            window=plugs.window,
            policy=plugs.policy,
            hidden_layers=hidden_layers,
        )
        self._seconds = self._policy_seconds = 0.0  # of a row that was there from the start
        self._policy_timer = Stopwatch(canvas.ids.device)
        self.rows = self._entered(self.state, range(len(canvas.ids)))
        self._ended: list[DecodeResult] = []  # that no result contains yet

    def _entered(self, state: DecodeState, slots: Iterable[int]) -> list[Row]:
        length = state.ids.shape[1] - state.start
        prompt_lengths = (state.positions[:, -1] + 1 - length).tolist()
        return [
            Row(
                slot=slot,
                prompt_length=prompt_length,
                seconds=self._seconds,
                policy_seconds=self._policy_seconds,
            )
            for slot, prompt_length in zip(slots, prompt_lengths, strict=True)
        ]

    def look(self) -> None:
        """Tells the host where rows are and how they have ended; waits for the device."""
        looked = torch.stack([first_column(self.state.unfinished), self.state.status])
        self.first_mask, self.status = looked.tolist()
        broken = [row for row, status in enumerate(self.status) if status == BROKEN]
        if broken:
            last_step = int(self.state.step[broken[0]]) - 1
            raise NotANumberError([self.rows[row].slot for row in broken], step=last_step)

    def prepare(self) -> None:
        """Does what the host has to do before a step: plans, prompts of new rows."""
        with self._own_precision():
            self._forwards.prepare(self.state, self.first_mask)

    def step(self, requires: frozenset[str]) -> StepRecord:
        """Takes a step."""
        with self._own_precision():
            decision = decide(
                self.state,
                self._plugs,
                self._forwards,
                requires=requires,
                policy_timer=self._policy_timer,
            )
        self.state = advance(decision)
        return decision.record

    def _own_precision(self) -> AbstractContextManager[object]:
        # Half-precision weights compute in their own dtype: a trainer's autocast would add casts.
        is_half = getattr(self._backbone, "dtype", torch.float32).itemsize == 2
        return without_autocast(self.state.ids.device) if is_half else nullcontext()

    def add_seconds(self, seconds: float) -> None:
        """Divides the time of a finished step equally among its rows."""
        self._seconds += seconds / len(self.rows)
        self._policy_seconds += self._policy_timer.seconds() / len(self.rows)

    def end_rows(self) -> list[int]:
        """Stores the results of the rows that have ended; returns the rows' numbers."""
        ended = [number for number, status in enumerate(self.status) if status != RUNNING]
        if ended:
            self._ended.append(self._result(ended))
        return ended

    def refill(self, ended: list[int], canvas: Canvas) -> tuple[DecodeResult, DecodeState]:
        """Replaces ended rows; returns the result of all that have ended, and the new rows."""
        result = self.result()
        state, entering = self.state, self._plugs.begin(self._backbone, canvas)
        slots = [self.rows[number].slot for number in ended]
        for number, row in zip(ended, self._entered(entering, slots), strict=True):
            self.rows[number] = row
        present = {number for number, status in enumerate(self.status) if status == RUNNING}
        longest = max(self.rows[number].prompt_length for number in present.union(ended))
        # For prompts of other lengths the canvas grows on the left, or shrinks if at least an
        # eighth of it would be padding in every row.
        by = longest - state.start
        by = by if by > 0 or -8 * by >= state.ids.shape[1] else 0
        pad_id = self._backbone.spec.pad_id
        state = state.shifted(by, pad_id=pad_id)
        entering = entering.shifted(state.start - entering.start, pad_id=pad_id)
        index = row_index(ended, state.ids.device)
        entering = replace(entering, rows=state.rows[index])
        if state.pad_mask is not None or entering.pad_mask is not None:
            state, entering = (
                replace(one, pad_mask=torch.ones_like(one.masked)) if one.pad_mask is None else one
                for one in (state, entering)
            )
        self.state = state.put(index, entering)
        self._forwards.put(ended, self.state, by=by)
        return result, entering

    def drop(self, ended: list[int]) -> None:
        """Lets rows that have ended leave the batch."""
        kept = [number for number in range(len(self.rows)) if number not in set(ended)]
        index = row_index(kept, self.state.ids.device)
        self.state = self.state.take(index)
        self._forwards.take(kept, index)
        self.rows = [self.rows[number] for number in kept]
        self.first_mask = [self.first_mask[number] for number in kept]
        self.status = [self.status[number] for number in kept]

    @property
    def has_ended_rows(self) -> bool:
        """Whether rows have ended that no result contains yet."""
        return bool(self._ended)

    def result(self) -> DecodeResult:
        """Returns the result of the rows that have ended since the last one, by their slots."""
        ended, self._ended = self._ended, []
        joined = DecodeResult.joined(ended, pad_id=self._backbone.spec.pad_id)
        return replace(joined.by_slot(), num_forwards=self._forwards.num_forwards)

    def _result(self, ended: list[int]) -> DecodeResult:
        state, rows = self.state.take(row_index(ended, self.state.ids.device)), self.rows
        seconds = [self._seconds - rows[number].seconds for number in ended]
        policy_seconds = [self._policy_seconds - rows[number].policy_seconds for number in ended]
        has_stalls = self._plugs.settings.stall_rule == "top1"
        return DecodeResult(
            ids=state.ids,
            rows=[rows[number].slot for number in ended],
            start=state.start,
            seeds=state.seeds,
            num_steps=state.step,
            idle_steps=state.step - state.num_wrote,
            stalled_steps=(state.step - state.num_decided) * has_stalls,
            policy_forwards=state.step * self._plugs.policy.forwards_per_step,
            seconds=torch.tensor(seconds, dtype=torch.float64),
            policy_seconds=torch.tensor(policy_seconds, dtype=torch.float64),
            status=[_STATUS[self.status[number]] for number in ended],
            num_forwards=self._forwards.num_forwards,
            given=~state.editable,
        )


class Stopwatch:
    """Measures the seconds between entering and leaving a ``with`` block.

    On a CPU this is a clock; on CUDA, two events in the stream, so that the work is timed and not
    its launch, and nothing waits until :meth:`seconds` is called.
    """

    def __init__(self, device: torch.device) -> None:
        count = 2 if device.type == "cuda" else 0
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
        self._clock = 0.0

    def __enter__(self) -> Stopwatch:
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
