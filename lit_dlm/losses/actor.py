"""The clipped policy objective of TraceRL and its relatives, per predicted token."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from lit_dlm.losses.terms import LossTerms

KLEstimator = Literal["k3", "k1"]

MAX_LOG_RATIO = 10.0
"""Logarithms of ratios are cut here, so that one token cannot overflow a batch."""
MAX_FALL = 2.5
"""Nats that a log-probability may fall before ``k3`` goes on as a straight line: its gradient grows
with the inverse probability, and a single token that the policy has given up decides an update."""


def k3(log_prob: Tensor, reference: Tensor) -> Tensor:
    """Low-variance estimate of ``KL(policy || reference)`` from the policy's own samples.

    ``exp(-d) - 1 + d`` with ``d = log_prob - reference`` (J. Schulman, "Approximating KL
    divergence", 2020; GRPO, arXiv:2402.03300, eq. 4): never negative, 0 where both agree. Below
    ``d = -MAX_FALL`` its tangent there, so that a token's gradient is at most ``exp(MAX_FALL) - 1``
    and never 0.

    Args:
        log_prob: ``(N,)`` floating point.
        reference: ``(N,)`` log-probabilities of the same tokens elsewhere.

    Returns:
        ``(N,)`` nats.
    """
    difference = log_prob - reference
    near = difference.clamp_min(-MAX_FALL)
    return torch.expm1(-near) + near + math.expm1(MAX_FALL) * (near - difference)


def clipped_objective(
    ratio: Tensor, advantage: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """``min(r A, clip(r, 1 - low, 1 + high) A)`` (PPO, arXiv:1707.06347, eq. 7).

    Args:
        ratio: ``(N,)`` probability under the policy over that under the old one.
        advantage: ``(N,)``.
        clip_low: how far a ratio may fall.
        clip_high: how far it may rise (the same in PPO; more in DAPO, arXiv:2503.14476).

    Returns:
        ``(N,)``, to be maximised.
    """
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.minimum(ratio * advantage, clipped * advantage)


def actor_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    weight: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    beta: float = 0.0,
    kl: KLEstimator = "k3",
    reference: Tensor | None = None,
    kl_weight: Tensor | None = None,
) -> LossTerms:
    """Policy loss of scored tokens (TraceRL, arXiv:2509.06949): a weighted sum, not a mean.

    Args:
        log_prob: ``(N,)`` floating point, log-probabilities of the tokens, with gradient.
        old_log_prob: ``(N,)`` those of the policy that the ratio is taken to.
        advantage: ``(N,)``.
        weight: ``(N,)`` weight of each token; 0 takes it out of the loss and of every statistic.
        clip_low: how far a ratio may fall before its gradient is cut.
        clip_high: how far it may rise; ``clip_low`` by default.
        beta: weight of the divergence.
        kl: ``k3``, or ``k1`` for the plain difference of log-probabilities.
        reference: ``(N,)`` log-probabilities that the divergence is measured to; the old ones by
            default.
        kl_weight: ``(N,)`` weight of each token's divergence; ``weight`` by default.

    Returns:
        ``total``, and in ``parts`` the ``policy`` and ``kl`` terms it is made of, and over the
        tokens with weight: ``ratio`` (mean), ``clip_fraction`` (share whose gradient is cut),
        ``kl_mean`` (nats a token).

    Raises:
        ValueError: shapes differ or an option is out of range.
    """
    shapes = {tuple(value.shape) for value in (log_prob, old_log_prob, advantage, weight)}
    if len(shapes) > 1 or log_prob.ndim != 1:
        raise ValueError(
            f"actor_loss: expected log_prob, old_log_prob, advantage and weight (N,), got {shapes}"
        )
    clip_high = clip_low if clip_high is None else clip_high
    if kl not in ("k3", "k1"):
        raise ValueError(f"kl: expected 'k3' or 'k1', got {kl!r}")
    counted = weight > 0
    # Tokens without weight may hold anything; they must not give 0 * inf.
    log_prob = torch.where(counted, log_prob, 0.0)
    difference = torch.where(counted, log_prob - old_log_prob.detach(), 0.0)
    ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    gain = clipped_objective(ratio, advantage, clip_low=clip_low, clip_high=clip_high)
    policy = -(weight * torch.where(counted, gain, 0.0)).sum()
    anchor = old_log_prob if reference is None else reference
    anchor = torch.where(counted, anchor.detach(), 0.0)
    divergence = k3(log_prob, anchor) if kl == "k3" else log_prob - anchor
    divergence_term = ((weight if kl_weight is None else kl_weight) * divergence).sum()
    count = counted.sum().clamp_min(1)
    with torch.no_grad():
        outside = torch.where(advantage >= 0, ratio > 1 + clip_high, ratio < 1 - clip_low)
        parts = {
            "policy": policy.detach(),
            "kl": divergence_term.detach(),
            "ratio": torch.where(counted, ratio, 0.0).sum() / count,
            "clip_fraction": (outside & counted).float().sum() / count,
            "kl_mean": torch.where(counted, divergence, 0.0).sum() / count,
        }
    return LossTerms(policy + beta * divergence_term, parts)
