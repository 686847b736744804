"""The loss of the acceptance policy: weighted binary cross-entropy (arXiv 2605.24697, the release).

The label of a masked position says whether its proposal is already the token that the trace ended
with. Accepting a wrong token costs more than waiting.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_dlm.system.options import at_least, refuse
from lit_dlm.training.terms import LossTerms

_FRONT_SLOPE = 0.5
"""Positives lose up to this share of their weight from the frontier to the far end (release)."""
_NEGATIVE_WEIGHT = 2.0
"""Weight of a masked position whose proposal is not the final token (release)."""
_TAU_WEIGHT = 0.001
"""Weight of the mean squared threshold (release)."""


@dataclass(frozen=True, kw_only=True)
class AcceptanceLossSettings:
    """Options that differ between recipes; the weights are the release's."""

    written_tail: bool = False
    """Whether the tail includes positions that are already written, as in the release; by default
    only positions that a decode could still decide on are scored."""
    wrong_trace_weight: float = 1.0
    """Weight factor of all positions of a trace whose answer was graded as wrong; 1 needs no
    grades."""

    def __post_init__(self) -> None:
        at_least(0, of="AcceptanceLossSettings.", wrong_trace_weight=self.wrong_trace_weight)


def acceptance_weights(
    label: Tensor,
    is_gen: Tensor,
    is_tail: Tensor,
    visible: Tensor,
    *,
    is_correct: Tensor | None = None,
    settings: AcceptanceLossSettings | None = None,
) -> Tensor:
    """Returns the weight of every position, ``(B, R)`` float32, 0 outside the loss set.

    Args:
        label: ``(B, R)`` bool: the proposal is the trace's final token.
        is_gen: ``(B, R)`` bool: masked positions; tail positions may be among them.
        is_tail: ``(B, R)`` bool: positions that end as padding after the answer; in the release
            also those already written.
        visible: ``(B, R)`` bool: what the network saw.
        is_correct: ``(B,)`` bool: the trace's answer was not graded as wrong.
    """
    settings = settings or AcceptanceLossSettings()
    gen = is_gen & ~is_tail & visible
    # Next to the frontier a right proposal matters most: a decode meets it first.
    rank = gen.cumsum(1) - 1
    last_rank = (gen.sum(1, keepdim=True) - 1).clamp_min(1)
    front = (1.0 - _FRONT_SLOPE * rank / last_rank).clamp_min(0.0)
    # Padding after an answer counts as one token at most, its cropped part included.
    gen_weight = torch.where(label, front, _NEGATIVE_WEIGHT)
    tail_weight = 1.0 / is_tail.sum(1, keepdim=True).clamp_min(1)
    weight = gen * gen_weight + (is_tail & visible) * tail_weight
    if settings.wrong_trace_weight != 1.0:
        # A wrong answer teaches the network to trust the mistakes that led to it.
        if is_correct is None:
            wanted = "graded traces (generate them with the shard writer's grade: true)"
            option = "AcceptanceLossSettings.wrong_trace_weight"
            refuse(option, wanted, "traces without a grade")
        weight = weight * torch.where(is_correct, 1.0, settings.wrong_trace_weight)[:, None]
    return weight


def acceptance_loss(
    logits: Tensor, tau: Tensor, label: Tensor, weight: Tensor, *, norm: Tensor | None = None
) -> LossTerms:
    """``sum w_i BCE(logit_i - tau, label_i) / sum w_i + 0.001 * mean(tau^2)``.

    Args:
        logits: ``(B, R)`` acceptance logits; any finite value outside the loss set.
        tau: ``(B,)`` thresholds.
        weight: ``(B, R)`` from :func:`acceptance_weights`.
        norm: scalar that replaces ``sum w_i`` for one part of a larger batch: with the sum over all
            parts divided by their number, the mean of the parts' losses is the loss of the whole.
    """
    # A batch without any weight has a loss of 0 and gradients of 0, so that processes stay in step.
    total_weight = (weight.sum() if norm is None else norm).clamp_min(1e-12)
    bce = F.binary_cross_entropy_with_logits(logits - tau[:, None], label.float(), reduction="none")
    bce = (bce * weight).sum() / total_weight
    # Only the difference of logit and threshold has a label; the penalty keeps both near 0.
    penalty = _TAU_WEIGHT * tau.square().mean()
    parts = {"bce": bce.detach(), "tau_penalty": penalty.detach()}
    return LossTerms(total=bce + penalty, parts=parts)


def prefix_crop(ratio: Tensor, in_response: Tensor, is_gen: Tensor, label: Tensor) -> Tensor:
    """``(B, R)`` bool visible positions: hides the right end of the response, as a window would.

    Keeps the prompt and the first ``max(1, round(ratio * G))`` response positions. A row in which
    they include no masked position with a positive label keeps everything. Padding is not removed.
    ``ratio`` is ``(B,)`` in ``(0, 1]``, the others ``(B, R)`` bool as in ``acceptance_weights``.
    """
    # A crop without a proposal to accept teaches nothing but to wait, so such rows are shown whole.
    length = in_response.sum(1)
    limit = (ratio * length).round().clamp_min(1)
    offset = in_response.cumsum(1) - 1
    visible = ~in_response | (offset < limit[:, None])
    useful = (visible & is_gen & label).any(1)
    return visible | ~useful[:, None]
