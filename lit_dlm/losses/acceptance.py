"""The loss of the acceptance policy: weighted binary cross-entropy (arXiv 2605.24697, the release).

The label of a masked position asks whether its proposal is already the token that the trace ended
with. Positions differ in weight: accepting a wrong token costs more than waiting, the positions
next to the frontier matter more than those far right, and the run of padding behind an answer
counts as one token at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_dlm.losses.terms import LossTerms


@dataclass(frozen=True, kw_only=True)
class AcceptanceLossSettings:
    """Weights of the loss; the defaults are the release's."""

    front_slope: float = 0.5
    """Positives lose up to this share of their weight from the frontier to the far end."""
    negative_weight: float = 2.0
    """Weight of a masked position whose proposal is not the final token."""
    keep_weight: float = 1.0
    """Weight of a masked position whose features target masking did not hide."""
    share_tail_weight: bool = True
    """The padding behind an answer shares the weight of one token; otherwise it is like any
    other masked position."""
    tau_weight: float = 0.001
    """Weight of the mean squared threshold."""
    decision_only: bool = True
    """Train on decision logits only; otherwise the cross-entropy of the raw logits is added."""


def acceptance_weights(
    label: Tensor,
    is_gen: Tensor,
    is_tail: Tensor,
    visible: Tensor,
    *,
    kept: Tensor | None = None,
    settings: AcceptanceLossSettings | None = None,
) -> Tensor:
    """Weight of every position, 0 outside the loss set.

    The loss set is every visible masked or tail position. A tail position weighs ``1 / n_tail``,
    with ``n_tail`` counted over the whole row, cropped part included. Any other masked position
    weighs ``w_keep * w_front * w_neg``.

    Args:
        label: ``(B, R)`` bool: the proposal is the trace's final token.
        is_gen: ``(B, R)`` bool: masked positions; tail positions may be among them.
        is_tail: ``(B, R)`` bool: positions that end as padding behind the answer. The release
            counts those already written too; leave them out to score decidable ones only.
        visible: ``(B, R)`` bool: what the network saw.
        kept: ``(B, R)`` bool from target masking, or ``None``.
        settings: the weights.

    Returns:
        ``(B, R)`` float32.
    """
    settings = settings or AcceptanceLossSettings()
    if not settings.share_tail_weight:
        is_gen, is_tail = is_gen | is_tail, torch.zeros_like(is_tail)
    gen = is_gen & ~is_tail & visible
    rank = gen.cumsum(1) - 1
    last_rank = (gen.sum(1, keepdim=True) - 1).clamp_min(1)
    front = (1.0 - settings.front_slope * rank / last_rank).clamp_min(0.0)
    gen_weight = torch.where(label, front, settings.negative_weight)
    if kept is not None:
        gen_weight = gen_weight * torch.where(kept, settings.keep_weight, 1.0)
    tail_weight = 1.0 / is_tail.sum(1, keepdim=True).clamp_min(1)
    return gen * gen_weight + (is_tail & visible) * tail_weight


def acceptance_loss(
    logits: Tensor,
    tau: Tensor,
    label: Tensor,
    weight: Tensor,
    *,
    settings: AcceptanceLossSettings | None = None,
) -> LossTerms:
    """``sum w_i BCE(logit_i - tau, label_i) / sum w_i + tau_weight * mean(tau^2)``.

    Normalised over the local batch. A batch without any weight gives 0 with a gradient of 0, so
    that distributed ranks stay in step.

    Args:
        logits: ``(B, R)`` floating point acceptance logits; any finite value outside the loss set.
        tau: ``(B,)`` thresholds.
        label: ``(B, R)`` bool.
        weight: ``(B, R)`` from :func:`acceptance_weights`.
        settings: the weights.

    Returns:
        The loss with the parts ``bce``, ``tau_penalty`` and, when used, ``raw_bce``.
    """
    settings = settings or AcceptanceLossSettings()

    def weighted(values: Tensor) -> Tensor:
        bce = F.binary_cross_entropy_with_logits(values, label.float(), reduction="none")
        return (bce * weight).sum() / weight.sum().clamp_min(1e-12)

    bce = weighted(logits - tau[:, None])
    penalty = settings.tau_weight * tau.square().mean()
    total = bce + penalty
    parts = {"bce": bce.detach(), "tau_penalty": penalty.detach()}
    if not settings.decision_only:
        raw = weighted(logits)
        total = total + raw
        parts["raw_bce"] = raw.detach()
    return LossTerms(total=total, parts=parts)


def prefix_crop(ratio: Tensor, in_response: Tensor, is_gen: Tensor, label: Tensor) -> Tensor:
    """Training augmentation: hides the right end of the response, as a decode window would.

    Keeps the prompt and the first ``max(1, round(ratio * G))`` response positions. A row in which
    they hold no masked position with a positive label keeps everything.

    Args:
        ratio: ``(B,)`` floating point in ``(0, 1]``.
        in_response: ``(B, R)`` bool: response positions (padding excluded).
        is_gen: ``(B, R)`` bool: masked positions.
        label: ``(B, R)`` bool.

    Returns:
        ``(B, R)`` bool: visible positions; padding must still be taken out by the caller.
    """
    length = in_response.sum(1)
    limit = (ratio * length).round().clamp_min(1)
    offset = in_response.cumsum(1) - 1
    visible = ~in_response | (offset < limit[:, None])
    useful = (visible & is_gen & label).any(1)
    return visible | ~useful[:, None]
