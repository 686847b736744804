"""Verification by re-execution: teacher-forced (V3) and free-running (V4).

Teacher-forced, every recorded canvas is fed to the model again, the step is decided by the very
function that the decode loop calls, and the result is compared with the next recorded canvas. One
difference does not lead to others. Free-running, the prompt is decoded again from its seed, and
everything after the first difference follows from it.

Records are executed in batches, in their stored order. Their rows are not those that were beside
each other in the run, where one that ended was replaced by the next.

Floating point differs between machines, batch sizes and dtypes, so a step may decide differently
where two options were almost equal. Such a difference is explained by its margin: the distance by
which the executed step's own numbers would have to move to give the recorded decision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lit_dlm.backbones.base import Backbone
from lit_dlm.decoding.caches import NoCache
from lit_dlm.decoding.decoder import Decoder
from lit_dlm.decoding.engine import Decision, decide, enter_block, initial_state, needs
from lit_dlm.decoding.policies.lockstep import LockstepPolicy
from lit_dlm.decoding.policies.tracelock import TraceLockPolicy
from lit_dlm.decoding.state import (
    Canvas,
    DecodeResult,
    DecodeState,
    StepRecord,
    prompt_canvas,
)
from lit_dlm.decoding.windows import first_column
from lit_dlm.pictures import placed, take_up
from lit_dlm.trajectories.record import Trajectory
from lit_dlm.trajectories.replay import states_at

Outcome = Literal["exact", "explained", "failed"]

TOLERANCE = 0.01
"""Margin below which a differing decision counts as a near tie."""

MANY_TIES = 4
"""From so many differing steps on, they must not be more than half of the checked ones, if a record
is to count as explained: a model whose distributions are flat finds near ties everywhere."""

_STATUS_OPEN = "step_limit"


@dataclass(frozen=True, kw_only=True)
class RecordVerdict:
    """What re-execution says of one record."""

    uid: str
    """The record."""
    outcome: Outcome
    """``exact``: every decision is the recorded one; ``explained``: every differing decision was a
    near tie, and near ties are the exception (see :data:`MANY_TIES`); ``failed``."""
    num_checked: int
    """Steps that were compared."""
    num_agreeing: int
    """Steps after which the canvas is the recorded one."""
    token_agreement: float
    """Share of equal tokens: of those that the checked steps wrote (teacher-forced), or of the
    final response (free-running)."""
    first_step: int | None
    """First step that differs, or ``None``."""
    differing_steps: tuple[int, ...]
    """All checked steps that differ; the others agree."""
    margin: float
    """Largest margin among the differing decisions; infinite when no near tie explains one."""
    reason: str
    """What differs, in words; empty when nothing does."""


class RecordTally:
    """Counts of one record while it is executed."""

    def __init__(self, record: Trajectory) -> None:
        self.record = record
        self.num_checked = 0
        self.num_agreeing = 0
        self.num_tokens = 0
        self.num_equal = 0
        self.first_step: int | None = None
        self.differing_steps: list[int] = []
        self.margin = 0.0
        self.reason = ""

    def differ(self, step: int, margin: float, reason: str) -> None:
        """A step decided otherwise, by a margin."""
        self.differing_steps.append(step)
        if self.first_step is None:
            self.first_step, self.reason = step, f"step {step}: {reason}"
        self.margin = max(self.margin, margin)

    def fail(self, step: int, reason: str) -> None:
        """Something that no near tie can explain."""
        self.differing_steps.append(step)
        if self.margin < float("inf"):  # the reason that fails it is the one to tell
            self.reason = f"step {step}: {reason}"
        self.first_step = step if self.first_step is None else self.first_step
        self.margin = float("inf")

    def verdict(self, tolerance: float, *, independent: bool) -> RecordVerdict:
        """The sum of it.

        Args:
            tolerance: margin below which a differing decision is explained.
            independent: whether the differing steps were decided independently; otherwise all but
                the first may follow from it, and their number says nothing.
        """
        outcome: Outcome = "exact"
        if self.first_step is not None:
            num = len(self.differing_steps)
            too_many = independent and num >= MANY_TIES and 2 * num > self.num_checked
            outcome = "explained" if self.margin < tolerance and not too_many else "failed"
        return RecordVerdict(
            uid=self.record.uid,
            outcome=outcome,
            num_checked=self.num_checked,
            num_agreeing=self.num_agreeing,
            token_agreement=self.num_equal / self.num_tokens if self.num_tokens else 1.0,
            first_step=self.first_step,
            differing_steps=tuple(self.differing_steps),
            margin=self.margin,
            reason=self.reason,
        )


def teacher_forced(
    backbone: Backbone,
    decoder: Decoder,
    records: Sequence[Trajectory],
    *,
    tolerance: float = TOLERANCE,
    steps: frozenset[int] | None = None,
    captured: Callable[[int], frozenset[str]] = lambda _step: frozenset(),
    device: torch.device | str = "cpu",
    on_step: Callable[[int], None] | None = None,
) -> list[RecordVerdict]:
    """Decides recorded steps again (V3).

    Args:
        backbone: the denoiser.
        decoder: the plugs that the records were made with.
        records: records of one batch: one response length, one mask id.
        tolerance: margin below which a differing decision is explained.
        steps: only these steps; all by default.
        captured: what the run's capture asked of each step, such as ``region``: more columns in
            one product can change its last bits.
        device: where to compute.
        on_step: called with the number of records in each executed step.

    Returns:
        One verdict per record.

    Raises:
        ValueError: the records cannot be executed with this backbone.
    """
    decoder.check(backbone)
    backbone = decoder.guided(backbone)
    if steps is not None and not isinstance(decoder.cache, NoCache):
        raise ValueError(
            f"steps: with {type(decoder.cache).__name__} a step depends on the ones before it, so "
            "all have to be executed; leave the selection of steps out"
        )
    plugs = decoder.plugs(backbone.spec)
    requires, hidden_layers = needs(decoder.policy)
    margins = _stored_margins(records, device)
    tallies = [RecordTally(record) for record in records]
    num_steps = torch.tensor([record.num_steps for record in records], device=device)
    with torch.no_grad():
        canvas = decoder.prepared(canvas_of(records, backbone, device=device), backbone)
        state = initial_state(backbone, canvas)
        session = decoder.cache.start(
            backbone, state, window=plugs.window, hidden_layers=hidden_layers
        )
        for step in count():
            # A row ends where its record does, whatever this model would do.
            running = num_steps[state.rows] > step
            full = running & ~state.masked.any(1)
            for row in state.rows[full].tolist():
                tallies[row].fail(step, "the canvas was full before this recorded step")
            keep = (running & ~full).nonzero()[:, 0]
            if not len(keep):
                break
            if len(keep) < len(state.rows):
                state = state.take(keep)
                if session is not None:
                    session.take(keep.tolist(), keep)
            state = replace(state, frontier=tuple(first_column(state.masked).tolist()))
            after = _recorded_after(records, state, step)
            if steps is None or step in steps:
                decision = decide(
                    backbone,
                    state,
                    plugs,
                    requires=requires | captured(step) | {"logits"},
                    hidden_layers=hidden_layers,
                    session=session,
                )
                state = decision.record.state
                stored = None if margins is None else margins[state.rows]
                compared = compare_step(decision, after, decoder, stored)
                tally_step(tallies, decision, after, compared.margin, decoder, step)
                if on_step is not None:
                    on_step(len(state.rows))
            else:  # without a decision, but quotas count the steps of a block
                state = enter_block(state, plugs.window.view(state), counts=True)
            # On with the recorded tokens: one difference must not cause others.
            state = _advanced(state, after)
    _release(backbone, canvas)
    return [tally.verdict(tolerance, independent=True) for tally in tallies]


def free_running(
    backbone: Backbone,
    decoder: Decoder,
    records: Sequence[Trajectory],
    *,
    tolerance: float = TOLERANCE,
    captured: Callable[[int], frozenset[str]] = lambda _step: frozenset(),
    device: torch.device | str = "cpu",
    on_step: Callable[[int], None] | None = None,
) -> list[RecordVerdict]:
    """Decodes the prompts again from their seeds (V4).

    A record is ``explained`` when the first step that differs was a near tie; later differences
    follow from that one. Arguments and errors are those of :func:`teacher_forced`.

    Returns:
        One verdict per record.
    """
    canvas = canvas_of(records, backbone, device=device)
    observer = _FirstDifference(records, decoder, captured, device=device, on_step=on_step)
    result = decoder(backbone, canvas, [observer])
    _release(backbone, canvas)
    response = result.ids[:, result.start :].cpu().numpy()
    for row, tally in enumerate(observer.tallies):
        record = tally.record
        tally.num_tokens = max(record.num_generated, 1)
        tally.num_equal = int((response[row] == record.tokens).sum())
        num_steps, status = int(result.num_steps[row]), result.status[row]
        if (num_steps, status) != (record.num_steps, record.status) and tally.first_step is None:
            tally.fail(
                min(num_steps, record.num_steps),
                f"{record.num_steps} steps, {record.status} recorded; "
                f"{num_steps} steps, {status} now",
            )
    return [tally.verdict(tolerance, independent=False) for tally in observer.tallies]


def canvas_of(
    records: Sequence[Trajectory], backbone: Backbone, *, device: torch.device | str = "cpu"
) -> Canvas:
    """The canvas that a batch of records was decoded from.

    Raises:
        ValueError: a prompt is empty, response lengths differ, or the mask id or the
            vocabulary does not fit the backbone.
    """
    lengths = sorted({record.num_generated for record in records})
    if len(lengths) != 1:
        raise ValueError(f"re-execution: expected one response length in a batch, got {lengths}")
    for record in records:
        where = f"trajectory {record.uid!r}"
        if record.mask_id != backbone.spec.mask_id:
            raise ValueError(
                f"{where}: recorded with mask id {record.mask_id}, "
                f"the backbone has {backbone.spec.mask_id}"
            )
        if record.vocab_size != backbone.vocab_size:
            raise ValueError(
                f"{where}: recorded with a vocabulary of {record.vocab_size}, "
                f"the backbone has {backbone.vocab_size}"
            )
    prompts = [record.prompt_ids.tolist() for record in records]
    for row, record in enumerate(records):
        take_up(backbone, record.uid, record.meta)
        if getattr(backbone, "vision", None) is not None:
            prompts[row] = placed(backbone, prompts[row], record.meta.get("images", ()))
    canvas = prompt_canvas(
        prompts,
        response_length=lengths[0],
        spec=backbone.spec,
        seeds=[signed_seed(record.seed) for record in records],
        device=device,
    )
    if all(record.given is None for record in records):
        return canvas
    ids, editable = canvas.ids.clone(), canvas.editable.clone()
    for row, record in enumerate(records):
        if record.given is not None:
            given = torch.from_numpy(record.given).to(device)
            tokens = torch.from_numpy(record.tokens).long().to(device)
            ids[row, canvas.start :][given] = tokens[given]
            editable[row, canvas.start :] = ~given
    return replace(canvas, ids=ids, editable=editable)


def _release(backbone: Backbone, canvas: Canvas) -> None:
    """Lets go of the pictures that :func:`canvas_of` took up."""
    if (vision := getattr(backbone, "vision", None)) is not None:
        vision.release(canvas.ids[:, : canvas.start].flatten().tolist())


class _FirstDifference:
    """Observer that compares a decode with records until each first differs."""

    def __init__(
        self,
        records: Sequence[Trajectory],
        decoder: Decoder,
        captured: Callable[[int], frozenset[str]],
        *,
        device: torch.device | str,
        on_step: Callable[[int], None] | None,
    ) -> None:
        self.requires = captured(0) | {"logits"}
        self._captured = captured
        self.tallies = [RecordTally(record) for record in records]
        self._records = records
        self._margins = _stored_margins(records, device)
        self._decoder = decoder
        self._on_step = on_step

    def on_start(self, state: DecodeState) -> None:
        """Counts steps from 0."""
        self._step = 0

    def on_step(self, record: StepRecord) -> None:
        """Compares the canvases; margins only for rows that never differed before."""
        state, step = record.state, self._step
        self._step += 1
        self.requires = self._captured(self._step) | {"logits"}
        after = _recorded_after(self._records, state, step)
        decided = torch.ones_like(state.rows, dtype=torch.bool)
        stored = None if self._margins is None else self._margins[state.rows]
        decision = Decision(record, decided, None)
        compared = compare_step(decision, after, self._decoder, stored)
        differs, margins = compared.differs.tolist(), compared.margin.tolist()
        for i, row in enumerate(state.rows.tolist()):
            tally = self.tallies[row]
            tally.num_checked += 1
            if not differs[i]:
                tally.num_agreeing += 1
            elif tally.first_step is None:
                different = record.new_ids[i] != after[i]
                reason = describe_difference(different, after[i], record, i)
                tally.differ(step, margins[i], reason)
            else:  # follows from the first one
                tally.differing_steps.append(step)
        if self._on_step is not None:
            self._on_step(len(state.rows))

    def on_end(self, result: DecodeResult) -> None:
        """Nothing to finish."""


def _advanced(state: DecodeState, ids: Tensor) -> DecodeState:
    """The state before the next step, with the recorded canvas."""
    return replace(
        state,
        ids=ids,
        masked=state.editable & (ids == state.mask_id),
        step=state.step + 1,
        block_step=state.block_step + 1,
        written=ids != state.ids,
    )


def _recorded_after(records: Sequence[Trajectory], state: DecodeState, step: int) -> Tensor:
    """``(b, L)`` int64: the canvases that the records have after a step."""
    after = state.ids.clone()
    here = [records[row] for row in state.rows.tolist()]
    after[:, state.start :] = states_at(here, step + 1).to(after.device)
    return after


def _stored_margins(records: Sequence[Trajectory], device: torch.device | str) -> Tensor | None:
    """``(B, P + G)`` stored selection margins, not a number outside the response."""
    if not any("commit_margin" in record.signals for record in records):
        return None
    width = max(record.num_prompt for record in records)
    margins = np.full((len(records), width + records[0].num_generated), np.nan, dtype=np.float32)
    for row, record in enumerate(records):
        if "commit_margin" in record.signals:
            margins[row, width:] = record.signals["commit_margin"]
    return torch.from_numpy(margins).to(device)


def signed_seed(seed: int) -> int:
    """A stored seed as the signed 64-bit integer that the loop works with."""
    return seed - 2**64 if seed >= 2**63 else seed


# -- one step and one record -----------------------------------------------------------------------


def tally_step(
    tallies: Sequence[RecordTally],
    decision: Decision,
    after: Tensor,
    margin: Tensor,
    decoder: Decoder,
    number: int,
) -> None:
    """Adds a teacher-forced step to the tallies of its rows."""
    step = decision.record
    state = step.state
    wrote = after != state.ids
    num_tokens = wrote.sum(1).tolist()
    num_equal = (wrote & (step.new_ids == after)).sum(1).tolist()
    differing = step.new_ids != after
    is_open = (state.editable & (step.new_ids == state.mask_id)).any(1)
    has_ended = torch.zeros_like(is_open) if decision.ended is None else decision.ended
    status = [
        "complete" if not left else "eos" if ended else _STATUS_OPEN
        for left, ended in zip(is_open.tolist(), has_ended.tolist(), strict=True)
    ]
    for i, row in enumerate(state.rows.tolist()):
        tally = tallies[row]
        tally.num_checked += 1
        tally.num_tokens += num_tokens[i]
        tally.num_equal += num_equal[i]
        if bool(differing[i].any()):
            reason = describe_difference(differing[i], after[i], step, i)
            tally.differ(number, float(margin[i]), reason)
            continue
        wrong_end = _wrong_end(tally.record, number, status[i], decoder)
        if wrong_end:
            tally.fail(number, wrong_end)
        else:
            tally.num_agreeing += 1


def _wrong_end(record: Trajectory, step: int, status: str, decoder: Decoder) -> str:
    """Why a record may not go on, or end, after an agreeing step; empty when it may."""
    if step < record.num_steps - 1:
        return "" if status == _STATUS_OPEN else f"the record goes on, the loop ends ({status})"
    if record.status == "aborted":
        return ""
    if status != record.status:
        return f"the record ends here ({record.status}), the loop says {status}"
    num_masks = int((record.initial() == record.mask_id).sum())
    budget = decoder.settings.max_steps or num_masks
    if status == _STATUS_OPEN and record.num_steps < budget:
        return f"the record stops at {record.num_steps} steps, the loop has {budget}"
    return ""


def describe_difference(differing: Tensor, after: Tensor, step: StepRecord, row: int) -> str:
    """The first difference of a row, in words."""
    column = int(differing.nonzero()[0, 0])
    state = step.state
    old, ours, theirs = (int(x[column]) for x in (state.ids[row], step.new_ids[row], after))

    def spoken(token: int) -> str:
        return "nothing" if token == old else f"token {token}"

    return (
        f"position {column - state.start}: {spoken(theirs)} recorded, {spoken(ours)} now "
        f"({int(differing.sum())} positions differ)"
    )


@dataclass(frozen=True, eq=False)
class StepComparison:
    """Where a step and the record part, per row of the step."""

    differs: Tensor
    """``(b,)`` bool: the canvas after the step is another one."""
    margin: Tensor
    """``(b,)`` float64: the largest margin among the differing decisions of a row, 0 where nothing
    differs, infinite where no near tie can explain a difference. Tokens: difference of the
    softmax values that the arg-max chose from. Positions: difference of the policy's scores
    (probabilities, or nats for the entropy policy) to the boundary of the selection, or the
    recorded ``commit_margin`` where that is smaller."""


def compare_step(
    decision: Decision,
    recorded: Tensor,
    decoder: Decoder,
    recorded_margin: Tensor | None = None,
) -> StepComparison:
    """Compares a step with the recorded canvas after it.

    Args:
        decision: the executed step, with its forward.
        recorded: ``(b, L)`` int64 canvas that the record has after this step.
        decoder: the plugs that decided.
        recorded_margin: ``(b, L)`` stored selection margins of the writes, not a number where
            there is none.

    Returns:
        Differences and margins.
    """
    step, ids = decision.record, decision.record.state.ids
    differing = step.new_ids != recorded
    differs = differing.any(1)
    margin = torch.zeros(len(ids), dtype=torch.float64, device=ids.device)
    if not bool(differs.any()):
        return StepComparison(differs, margin)
    wrote = recorded != ids
    token_gap = _token_gaps(decision, recorded, decoder)
    position_gap = _position_gaps(decision, decoder)
    # Both questions can differ at once: which token, and whether it is written now.
    other_token = differing & wrote & (step.proposal.ids != recorded)
    other_set = differing & (wrote != step.commit)
    token_gap = torch.where(other_token, token_gap, 0.0)
    set_gap = torch.where(other_set, position_gap, 0.0)
    # An ended answer is filled: what differs there follows from the commits of the same step.
    is_fill = torch.zeros_like(differing)
    if decoder.settings.eos_rule == "fill":
        fill = step.state.eos_ids[0]
        is_fill = differing & ~step.commit & ((step.new_ids == fill) | (recorded == fill))
    decided = differing & ~is_fill
    largest_set = torch.where(decided, set_gap, 0.0).amax(1)
    if recorded_margin is not None:
        lost = decided & other_set & wrote
        stored = recorded_margin.double().abs().nan_to_num(torch.inf, torch.inf)
        stored = torch.where(lost, stored, 0.0).amax(1)
        largest_set = torch.where(lost.any(1), torch.minimum(largest_set, stored), largest_set)
    largest_token = torch.where(decided, token_gap, 0.0).amax(1)
    # Only a fill differs: one of its cells was the end that began it, the nearest to a tie.
    gaps = torch.maximum(token_gap, set_gap)
    first_end = torch.where(is_fill, gaps, torch.inf).amin(1)
    margin = torch.maximum(largest_set, largest_token)
    margin = torch.where(decided.any(1), margin, first_end)
    return StepComparison(differs, torch.where(differs, margin, 0.0))


def _token_gaps(decision: Decision, recorded: Tensor, decoder: Decoder) -> Tensor:
    """``(b, L)`` how much more probable the proposed token was than the recorded one."""
    state, denoised = decision.record.state, decision.record.denoised
    assert denoised is not None
    columns = denoised.columns
    gaps = torch.full(recorded.shape, torch.inf, dtype=torch.float64, device=recorded.device)
    values = decoder.sampler.perturbed(state, denoised).double().softmax(-1)
    best = values.amax(-1)
    other = values.gather(-1, recorded.gather(1, columns).clamp(0, values.shape[-1] - 1)[..., None])
    looked_at = best - other[..., 0]
    # A filtered-out or forbidden token has probability 0: no near tie.
    looked_at = looked_at.masked_fill(other[..., 0] == 0.0, torch.inf)
    return gaps.scatter(1, columns, looked_at)


def _position_gaps(decision: Decision, decoder: Decoder) -> Tensor:
    """``(b, L)`` how far each candidate's score is from being decided the other way."""
    step = decision.record
    scores = step.scores.double()
    threshold = getattr(decoder.policy, "threshold", None)
    if isinstance(decoder.policy, TraceLockPolicy):
        scores = scores.sigmoid()
    passed_over = step.candidates & ~step.commit
    weakest = scores.masked_fill(~step.commit, torch.inf).amin(1, keepdim=True)
    strongest = scores.masked_fill(~passed_over, -torch.inf).amax(1, keepdim=True)
    # A committed cell gives way to the best one passed over, and the other way round.
    gaps = torch.where(step.commit, scores - strongest, weakest - scores).clamp_min(0.0)
    if isinstance(decoder.policy, LockstepPolicy):
        threshold = decoder.policy.thresholds(step.state)
    if threshold is not None:
        gaps = torch.minimum(gaps, (scores - threshold).abs())
    return gaps.masked_fill(~step.candidates, torch.inf)
