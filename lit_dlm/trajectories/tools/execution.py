"""Executes records again: levels 3 (teacher-forced) and 4 (free-running) of a verification.

Teacher-forced, the function that the decode loop calls decides a step from its recorded canvas: one
difference does not lead to others. Free-running, everything after the first difference follows from
it.

Floating-point results differ between machines, batch sizes and dtypes, so a step may decide
differently where two options were almost equal. Such a difference is explained by its margin: how
far the executed step's own numbers would have to move to yield the recorded decision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lit_dlm.backbones.base import Backbone
from lit_dlm.backbones.visibility import first_column
from lit_dlm.decoding.decoder import Decoder
from lit_dlm.decoding.loop import decode
from lit_dlm.decoding.state import STATUS, Canvas, DecodeState, Observer, StepRecord, prompt_canvas
from lit_dlm.decoding.step import Decision, advance, decide, needs
from lit_dlm.trajectories.record import Trajectory, expect
from lit_dlm.vision.base import find_pictures, insert_pictures

Outcome = Literal["exact", "explained", "failed"]

TOLERANCE = 0.01
"""Margin below which a differing decision counts as a near tie."""
MANY_TIES = 4
"""With this many differing steps or more, a record counts as explained only if they are at most
half of the checked ones: a model with flat distributions has near ties everywhere."""


@dataclass(kw_only=True)
class RecordVerdict:
    """The result of re-executing one record."""

    uid: str
    outcome: Outcome = "exact"
    """``exact``: every decision is the recorded one; ``explained``: every differing decision was a
    near tie, and near ties are the exception (see :data:`MANY_TIES`); ``failed``."""
    num_checked: int = 0  # steps that were compared
    num_agreeing: int = 0  # steps after which the canvas is the recorded one
    num_tokens: int = 0
    num_equal: int = 0
    """Tokens that agree, of ``num_tokens``: those that the checked steps wrote (teacher-forced),
    or those of the final response (free-running)."""
    differing_steps: list[int] = field(default_factory=list)
    margin: float = 0.0
    """Largest margin among the differing decisions; infinite when no near tie explains one."""
    reason: str = ""  # what differs, in words; empty when nothing does

    @property
    def token_agreement(self) -> float:
        return self.num_equal / self.num_tokens if self.num_tokens else 1.0

    def differ(self, step: int, margin: float, reason: str) -> None:
        """Adds a step that decided otherwise; its margin is infinite if no near tie explains it."""
        is_worst = margin == float("inf") > self.margin
        # The first difference, or the first that no near tie explains: why the record fails.
        if is_worst or not self.differing_steps:
            self.reason = f"step {step}: {reason}"
        self.differing_steps.append(step)
        self.margin = max(self.margin, margin)

    def conclude(self, *, independent: bool) -> RecordVerdict:
        """Sets the outcome and returns the verdict.

        Unless steps are ``independent``, those after the first differing one may follow from it.
        """
        num = len(self.differing_steps)
        too_many = independent and num >= MANY_TIES and 2 * num > self.num_checked
        if num:
            self.outcome = "explained" if self.margin < TOLERANCE and not too_many else "failed"
        return self


def teacher_forced(
    backbone: Backbone,
    decoder: Decoder,
    records: Sequence[Trajectory],
    *,
    captured: Callable[[int], frozenset[str]] = lambda _step: frozenset(),
    device: torch.device | str = "cpu",
) -> list[RecordVerdict]:
    """Decides recorded steps again (V3), of records with one response length and mask id.

    ``captured`` is what the run's capture required of each step, such as ``region``: more columns
    in a matrix product can change its last bits.
    """
    decoder.check(backbone)
    backbone, decoder = decoder.guided(backbone), decoder.on(backbone.spec)
    requires, hidden_layers = needs(decoder.policy)
    verdicts = [RecordVerdict(uid=record.uid) for record in records]
    num_steps = torch.tensor([record.num_steps for record in records], device=device)
    with torch.no_grad():
        canvas = canvas_of(records, backbone, device=device)
        state = decoder.begin(backbone, canvas)
        forwards = decoder.forwards(backbone, state, hidden_layers)
        for step in count():
            # A row ends where its record does, whatever this model would do: what it would do after
            # that has nothing to be compared with.
            running = num_steps[state.rows] > step
            full = running & ~state.unfinished.any(1)
            for row in state.rows[full].tolist():
                reason = "the canvas was full before this recorded step"
                verdicts[row].differ(step, torch.inf, reason)
            keep = (running & ~full).nonzero()[:, 0]
            if not len(keep):
                break
            if len(keep) < len(state.rows):  # as in the decode loop: caches shrink with the batch
                state = state.take(keep)
                forwards.take(keep.tolist(), keep)
            forwards.prepare(state, first_column(state.unfinished).tolist())
            decision = decide(
                state, decoder, forwards, requires=requires | captured(step) | {"logits"}
            )
            after = _recorded_after(records, decision.record.state, step)
            _judge_step(verdicts, records, decision, after, decoder, step)
            # Continue with the recorded tokens: one difference must not cause others.
            state = advance(decision, new_ids=after)
    _release(backbone, canvas)
    return [verdict.conclude(independent=True) for verdict in verdicts]


def free_running(
    backbone: Backbone,
    decoder: Decoder,
    records: Sequence[Trajectory],
    *,
    captured: Callable[[int], frozenset[str]] = lambda _step: frozenset(),
    device: torch.device | str = "cpu",
) -> list[RecordVerdict]:
    """Decodes the prompts again from their seeds (V4); arguments as in :func:`teacher_forced`.

    A record is ``explained`` when the first step that differs was a near tie.
    """
    canvas = canvas_of(records, backbone, device=device)
    observer = _FirstDifference(records, decoder, captured)
    result = decode(backbone, decoder, canvas, [observer])
    _release(backbone, canvas)
    response = result.ids[:, result.start :].cpu().numpy()
    for row, (record, verdict) in enumerate(zip(records, observer.verdicts, strict=True)):
        verdict.num_tokens = record.num_generated
        verdict.num_equal = int((response[row] == record.tokens).sum())
        then = f"{record.num_steps} steps, {record.status}"
        now = f"{int(result.num_steps[row])} steps, {result.status[row]}"
        # Where a step differs, another number of steps may follow from it.
        if then != now and not verdict.differing_steps:
            last = min(int(result.num_steps[row]), record.num_steps)
            verdict.differ(last, torch.inf, f"{then} recorded; {now} now")
    return [verdict.conclude(independent=False) for verdict in observer.verdicts]


def canvas_of(
    records: Sequence[Trajectory], backbone: Backbone, *, device: torch.device | str = "cpu"
) -> Canvas:
    """The canvas that a batch of records was decoded from."""
    own = backbone.spec.mask_id, backbone.vocab_size, records[0].num_generated
    for record in records:
        recorded = record.mask_id, record.vocab_size, record.num_generated
        expect(
            recorded == own,
            f"trajectory {record.uid!r}: expected the backbone's mask id and vocabulary, and "
            f"one response length: {own}, got {recorded}",
        )
    prompts = [record.prompt_ids.tolist() for record in records]
    # Records number the rows of their pictures from the vocabulary size on; the backbone gives them
    # the ids that it holds the pictures under now.
    for row, record in enumerate(records):
        find_pictures(backbone, record.uid, record.meta)
        if getattr(backbone, "vision", None) is not None:
            prompts[row] = insert_pictures(backbone, prompts[row], record.meta.get("images", ()))
    canvas = prompt_canvas(
        prompts,
        response_length=records[0].num_generated,
        spec=backbone.spec,
        seeds=[signed_seed(record.seed) for record in records],
        device=device,
    )
    ids, editable = canvas.ids.clone(), canvas.editable.clone()
    for row, record in enumerate(records):
        if record.given is not None:
            ids[row, canvas.start :] = torch.from_numpy(record.initial()).to(device)
            editable[row, canvas.start :] = ~torch.from_numpy(record.given).to(device)
    return replace(canvas, ids=ids, editable=editable)


def _release(backbone: Backbone, canvas: Canvas) -> None:
    """Releases the pictures that :func:`canvas_of` inserted."""
    if (vision := getattr(backbone, "vision", None)) is not None:
        vision.release(canvas.ids[:, : canvas.start].flatten().tolist())


class _FirstDifference(Observer):
    """Compares a decode with records, and judges the first difference of each."""

    def __init__(
        self,
        records: Sequence[Trajectory],
        decoder: Decoder,
        captured: Callable[[int], frozenset[str]],
    ) -> None:
        self.requires = captured(0) | {"logits"}
        self.verdicts = [RecordVerdict(uid=record.uid) for record in records]
        self._records, self._decoder, self._captured = records, decoder, captured

    def on_start(self, state: DecodeState) -> None:
        self._step = 0

    def on_step(self, record: StepRecord) -> None:
        """Compares the canvases; only the first difference of a row gets a margin."""
        state, step = record.state, self._step
        self._step += 1
        self.requires = self._captured(self._step) | {"logits"}
        after = _recorded_after(self._records, state, step)
        differs, margin = compare_step(record, after, self._decoder)
        for i, row in enumerate(state.rows.tolist()):
            verdict = self.verdicts[row]
            verdict.num_checked += 1
            if not bool(differs[i]):
                verdict.num_agreeing += 1
            elif not verdict.differing_steps:
                verdict.differ(step, float(margin[i]), _difference(after[i], record, i))
            else:  # follows from the first one
                verdict.differing_steps.append(step)


def _recorded_after(records: Sequence[Trajectory], state: DecodeState, step: int) -> Tensor:
    """``(b, L)`` int64: the recorded canvases after a step."""
    here = [records[row] for row in state.rows.tolist()]
    responses = [record.state_at(min(step + 1, record.num_steps)) for record in here]
    after = state.ids.clone()
    after[:, state.start :] = torch.from_numpy(np.stack(responses)).to(after.device)
    return after


def signed_seed(seed: int) -> int:
    """A stored seed as the signed 64-bit integer that the loop works with."""
    return seed - 2**64 if seed >= 2**63 else seed


# -- one step and one record -----------------------------------------------------------------------


def _judge_step(
    verdicts: Sequence[RecordVerdict],
    records: Sequence[Trajectory],
    decision: Decision,
    after: Tensor,
    decoder: Decoder,
    number: int,
) -> None:
    """Adds a teacher-forced step to the verdicts of its rows."""
    step = decision.record
    state = step.state
    # Tokens count where the recorded step wrote: most positions are the same before and after.
    wrote = after != state.ids
    num_tokens = wrote.sum(1).tolist()
    num_equal = (wrote & (step.new_ids == after)).sum(1).tolist()
    differs, margin = compare_step(step, after, decoder)
    statuses = advance(decision).status.tolist()
    for i, row in enumerate(state.rows.tolist()):
        verdict = verdicts[row]
        verdict.num_checked += 1
        verdict.num_tokens += num_tokens[i]
        verdict.num_equal += num_equal[i]
        # A row that goes on has no status yet; a record may end there only at its step limit.
        status = STATUS.get(statuses[i], "step_limit")
        if differs[i]:
            verdict.differ(number, float(margin[i]), _difference(after[i], step, i))
        elif wrong_end := _wrong_end(records[row], number, status, decoder):
            verdict.differ(number, torch.inf, wrong_end)
        else:
            verdict.num_agreeing += 1


def _wrong_end(record: Trajectory, step: int, status: str, decoder: Decoder) -> str:
    """Why a record must not continue, or end, after an agreeing step; empty if it may."""
    if step < record.num_steps - 1:
        return "" if status == "step_limit" else f"the record goes on, the loop ends ({status})"
    if record.status == "aborted":  # from outside, which the loop cannot know
        return ""
    if status != record.status:
        return f"the record ends here ({record.status}), the loop says {status}"
    num_masks = int((record.initial() == record.mask_id).sum())
    budget = decoder.budget(num_masks)
    if status == "step_limit" and record.num_steps < budget:
        return f"the record stops at {record.num_steps} steps, the loop has {budget}"
    return ""


def _difference(after: Tensor, step: StepRecord, row: int) -> str:
    """The first difference of a row, in words."""
    differing = step.new_ids[row] != after
    column = int(differing.nonzero()[0, 0])
    state = step.state
    old, ours, theirs = (int(x[column]) for x in (state.ids[row], step.new_ids[row], after))

    def spoken(token: int) -> str:
        return "nothing" if token == old else f"token {token}"

    return (
        f"position {column - state.start}: {spoken(theirs)} recorded, {spoken(ours)} now "
        f"({int(differing.sum())} positions differ)"
    )


def compare_step(step: StepRecord, recorded: Tensor, decoder: Decoder) -> tuple[Tensor, Tensor]:
    """Compares an executed step with the recorded canvas after it, ``(b, L)`` int64.

    Returns:
        ``(b,)`` bool, whether the canvases differ, and ``(b,)`` float64, the largest margin of a
        differing decision: 0 where nothing differs, infinite where no near tie explains it. Tokens:
        difference of the softmax values that the arg-max chose from. Positions: distance of the
        policy's score (a probability, or nats for the entropy policy) from the boundary of the
        selection or, for a token already set, of taking it back.
    """
    ids = step.state.ids
    differing = step.new_ids != recorded
    # Almost every step agrees: the softmax over the vocabulary is taken only where one does not.
    differs = differing.any(1)
    margin = torch.zeros(len(ids), dtype=torch.float64, device=ids.device)
    if not bool(differs.any()):
        return differs, margin
    wrote = recorded != ids
    token_gap = _token_gaps(step, recorded, decoder)
    position_gap = _position_gaps(step, decoder)
    # For a token already set: the gap to keeping or rewriting it, or to its being the best itself.
    stood = ids != step.state.mask_id
    rewrite_gap = step.scores.abs().double()
    edited = stood & step.commit
    rewrite_gap = torch.where(edited, torch.minimum(rewrite_gap, token_gap), rewrite_gap)
    position_gap = torch.where(stood, rewrite_gap, position_gap)
    # Both questions can differ at once: which token, and whether it is written now. The larger gap
    # counts, as both decisions would have to be near ties.
    is_token = recorded != step.state.mask_id
    other_token = differing & wrote & is_token & (step.proposal.ids != recorded)
    other_set = differing & (wrote != torch.where(stood, step.new_ids != ids, step.commit))
    token_gap = torch.where(other_token, token_gap, 0.0)
    set_gap = torch.where(other_set, position_gap, 0.0)
    # An ended answer is filled: what differs there follows from the commits of the same step.
    is_fill = torch.zeros_like(differing)
    if decoder.settings.eos_rule == "fill":
        fill = step.state.eos_ids[0]
        is_end = (step.new_ids == fill) | (recorded == fill)
        is_fill = differing & ~step.commit & ~stood & is_end
    decided = differing & ~is_fill
    gaps = torch.maximum(token_gap, set_gap)
    margin = torch.where(decided, gaps, 0.0).amax(1)
    # If only a fill differs, one of its positions is the end that began it: the nearest to a tie.
    first_end = torch.where(is_fill, gaps, torch.inf).amin(1)
    margin = torch.where(decided.any(1), margin, first_end)
    return differs, torch.where(differs, margin, 0.0)


def _token_gaps(step: StepRecord, recorded: Tensor, decoder: Decoder) -> Tensor:
    """``(b, L)`` how much more probable the proposed token was than the recorded one."""
    state, denoised = step.state, step.denoised
    assert denoised is not None
    columns = denoised.columns
    # Outside the columns that were looked at there are no logits that could explain a token.
    gaps = torch.full(recorded.shape, torch.inf, dtype=torch.float64, device=recorded.device)
    values = decoder.sampler.perturbed(state, denoised).double().softmax(-1)
    best = values.amax(-1)
    other = values.gather(-1, recorded.gather(1, columns).clamp(0, values.shape[-1] - 1)[..., None])
    known = best - other[..., 0]
    # A filtered-out or forbidden token has probability 0: no near tie.
    known = known.masked_fill(other[..., 0] == 0.0, torch.inf)
    return gaps.scatter(1, columns, known)


def _position_gaps(step: StepRecord, decoder: Decoder) -> Tensor:
    """``(b, L)`` how far each candidate's score is from being decided the other way."""
    scores = decoder.policy.scale(step.scores)
    passed_over = step.candidates & ~step.commit
    weakest = scores.masked_fill(~step.commit, torch.inf).amin(1, keepdim=True)
    strongest = scores.masked_fill(~passed_over, -torch.inf).amax(1, keepdim=True)
    # A committed position would give way to the best one passed over, and vice versa.
    gaps = torch.where(step.commit, scores - strongest, weakest - scores).clamp_min(0.0)
    limit = decoder.policy.limit(step.state)
    if limit is not None:
        gaps = torch.minimum(gaps, (scores - limit).abs())
    return gaps.masked_fill(~step.candidates, torch.inf)
