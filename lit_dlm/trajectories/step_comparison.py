"""Compares one executed step with what a record says of it, and measures near ties.

Floating point differs between machines, batch sizes and dtypes, so a step may decide differently
where two options were almost equal. Such a difference is explained by its margin: the distance by
which the executed step's own numbers would have to move to give the recorded decision.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_dlm.backbones.base import Denoised
from lit_dlm.decoding.decoder import Decoder
from lit_dlm.decoding.engine import Decision
from lit_dlm.decoding.policies.lockstep import LockstepPolicy
from lit_dlm.decoding.policies.tracelock import TraceLockPolicy


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
    denoised: Denoised,
    decoder: Decoder,
    recorded_margin: Tensor | None = None,
) -> StepComparison:
    """Compares a step with the recorded canvas after it.

    Args:
        decision: the executed step.
        recorded: ``(b, L)`` int64 canvas that the record has after this step.
        denoised: the forward of the executed step.
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
    token_gap = _token_gaps(decision, recorded, denoised, decoder)
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


def _token_gaps(
    decision: Decision, recorded: Tensor, denoised: Denoised, decoder: Decoder
) -> Tensor:
    """``(b, L)`` how much more probable the proposed token was than the recorded one."""
    state, columns = decision.record.state, denoised.columns
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
