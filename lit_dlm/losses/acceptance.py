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
from lit_dlm.ops.options import at_least


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
    written_tail: bool = False
    """The tail also counts its positions that are written already, as in the release; by default
    only positions that a decode could still decide on are scored."""
    focal_gamma: float = 0.0
    """Exponent of the focal factor ``(1 - p_label)^gamma`` (arXiv 1708.02002); 0 is plain
    cross-entropy, 4 the release's older trainer."""
    position_decay: float = 1.0
    """Weight factor per rank from the frontier, for both labels (0.99 in the older trainer)."""
    hard_weight: float = 1.0
    """Weight factor of masked positions that a first pass misjudges at raw logit 0; needs
    ``decision_only: false`` (1.5 is an option of the release)."""
    wrong_trace_weight: float = 1.0
    """Weight factor of all positions of a trace whose answer was graded as wrong; 1 asks for no
    grades. A wrong answer teaches to trust the mistakes that led to it."""

    def __post_init__(self) -> None:
        weights = {name: value for name, value in vars(self).items() if name != "written_tail"}
        at_least(0, of="AcceptanceLossSettings.", **weights)
        if self.hard_weight != 1.0 and self.decision_only:
            raise ValueError(
                "AcceptanceLossSettings.hard_weight: expected 1 with decision_only, which has no "
                f"loss on raw logits, got {self.hard_weight}"
            )


def acceptance_weights(
    label: Tensor,
    is_gen: Tensor,
    is_tail: Tensor,
    visible: Tensor,
    *,
    kept: Tensor | None = None,
    hard: Tensor | None = None,
    is_correct: Tensor | None = None,
    settings: AcceptanceLossSettings | None = None,
) -> Tensor:
    """Weight of every position, 0 outside the loss set.

    The loss set is every visible masked or tail position. A tail position weighs ``1 / n_tail``,
    with ``n_tail`` counted over the whole row, cropped part included. Any other masked position
    weighs ``w_keep * w_front * w_neg`` (times ``position_decay^rank``, and ``hard_weight`` where it
    is hard). Everything in a trace that was graded as wrong is multiplied by
    ``wrong_trace_weight``.

    Args:
        label: ``(B, R)`` bool: the proposal is the trace's final token.
        is_gen: ``(B, R)`` bool: masked positions; tail positions may be among them.
        is_tail: ``(B, R)`` bool: positions that end as padding behind the answer. The release
            counts those already written too; leave them out to score decidable ones only.
        visible: ``(B, R)`` bool: what the network saw.
        kept: ``(B, R)`` bool from target masking, or ``None``.
        hard: ``(B, R)`` bool from :func:`hard_positions`, or ``None``.
        is_correct: ``(B,)`` bool: the trace's answer was graded as right; needed when
            ``wrong_trace_weight`` is not 1.
        settings: the weights.

    Returns:
        ``(B, R)`` float32.

    Raises:
        ValueError: wrong traces have their own weight, but no grades are given.
    """
    settings = settings or AcceptanceLossSettings()
    if not settings.share_tail_weight:
        is_gen, is_tail = is_gen | is_tail, torch.zeros_like(is_tail)
    gen = is_gen & ~is_tail & visible
    rank = gen.cumsum(1) - 1
    last_rank = (gen.sum(1, keepdim=True) - 1).clamp_min(1)
    front = (1.0 - settings.front_slope * rank / last_rank).clamp_min(0.0)
    gen_weight = torch.where(label, front, settings.negative_weight)
    if settings.position_decay != 1.0:
        gen_weight = gen_weight * settings.position_decay ** rank.clamp_min(0).float()
    if hard is not None:
        gen_weight = gen_weight * torch.where(hard, settings.hard_weight, 1.0)
    if kept is not None:
        gen_weight = gen_weight * torch.where(kept, settings.keep_weight, 1.0)
    tail_weight = 1.0 / is_tail.sum(1, keepdim=True).clamp_min(1)
    weight = gen * gen_weight + (is_tail & visible) * tail_weight
    if settings.wrong_trace_weight != 1.0:
        if is_correct is None:
            raise ValueError(
                "AcceptanceLossSettings.wrong_trace_weight: expected graded traces (generate them "
                "with the shard writer's grade: true), got traces without a grade"
            )
        weight = weight * torch.where(is_correct, 1.0, settings.wrong_trace_weight)[:, None]
    return weight


def hard_positions(raw_logits: Tensor, label: Tensor, is_gen: Tensor) -> Tensor:
    """Masked positions that a first pass misjudges at raw logit 0.

    Args:
        raw_logits: ``(B, R)`` of the first pass, before the threshold.
        label: ``(B, R)`` bool.
        is_gen: ``(B, R)`` bool: masked positions.

    Returns:
        ``(B, R)`` bool.
    """
    return is_gen & ((raw_logits >= 0.0) != label)


def acceptance_loss(
    logits: Tensor,
    tau: Tensor,
    label: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    settings: AcceptanceLossSettings | None = None,
) -> LossTerms:
    """``sum w_i BCE(logit_i - tau, label_i) / sum w_i + tau_weight * mean(tau^2)``.

    Normalised over the batch; a focal factor multiplies the cross-entropy where one is set. A batch
    without any weight gives 0 with a gradient of 0, so that distributed ranks stay in step.

    Args:
        logits: ``(B, R)`` floating point acceptance logits; any finite value outside the loss set.
        tau: ``(B,)`` thresholds.
        label: ``(B, R)`` bool.
        weight: ``(B, R)`` from :func:`acceptance_weights`.
        norm: scalar that replaces ``sum w_i``, where the batch is one part of a larger one: the
            sum over all parts divided by their number makes the mean of the parts' losses equal
            to the loss of the whole.
        settings: the weights.

    Returns:
        The loss with the parts ``bce``, ``tau_penalty`` and, when used, ``raw_bce``.
    """
    settings = settings or AcceptanceLossSettings()

    total_weight = (weight.sum() if norm is None else norm).clamp_min(1e-12)

    def weighted(values: Tensor) -> Tensor:
        bce = F.binary_cross_entropy_with_logits(values, label.float(), reduction="none")
        if settings.focal_gamma > 0.0:
            # bce is -log of the label's probability.
            bce = bce * (-torch.expm1(-bce)).clamp_min(1e-12) ** settings.focal_gamma
        return (bce * weight).sum() / total_weight

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
