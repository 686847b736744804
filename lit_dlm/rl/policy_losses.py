"""Policy losses per predicted token: the clipped one of TraceRL, or one of your own."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lit_dlm.config.components import Component
from lit_dlm.rl.batch import RolloutBatch
from lit_dlm.system.options import at_least, within
from lit_dlm.training.terms import LossTerms


class PolicyLoss(Component):
    """Turns scored tokens into the loss of the policy."""

    has_divergence: ClassVar[bool] = True
    """Whether it keeps the policy near another one, which ``objective.kl_to`` names."""
    needs_bounds: ClassVar[bool] = False
    """Whether it compares whole responses, whose states ``BoundViews`` draws."""

    def estimate(self, log_prob: Tensor, batch: RolloutBatch) -> Tensor:
        """Returns ``(M,)`` log-probabilities of tokens, given all ``(N,)`` scores of the states."""
        return batch.per_token(log_prob)

    @abstractmethod
    def compute(
        self,
        log_prob: Tensor,
        old_log_prob: Tensor,
        advantage: Tensor,
        weight: Tensor,
        *,
        reference: Tensor | None = None,
        kl_weight: Tensor | None = None,
    ) -> LossTerms:
        """Computes the loss of the tokens of a batch: a weighted sum, not a mean.

        Args:
            log_prob: ``(M,)`` floating point, log-probabilities of the tokens, with gradient.
            old_log_prob: ``(M,)`` under the policy at the beginning of the RL step.
            advantage: ``(M,)``.
            weight: ``(M,)`` weight of each token; 0 on copies that only fill a batch, whose other
                entries may hold anything.
            reference: ``(M,)`` log-probabilities under the initial policy, with
                ``objective.kl_to: initial``.
            kl_weight: ``(M,)`` weight of each token's divergence; ``weight`` by default.

        Returns:
            ``total``, and scalars in ``parts``. Of these, ``policy`` (the total without the
            divergence) is logged as ``train/policy_loss``, all others under their names.
        """


# Logarithms of ratios are clamped to this, so that one token cannot overflow a batch.
MAX_LOG_RATIO = 10.0


def k3(log_prob: Tensor, reference: Tensor, *, max_fall: float | None = 2.5) -> Tensor:
    """Low-variance estimate of ``KL(policy || reference)`` from the policy's own samples.

    ``exp(-d) - 1 + d`` with ``d = log_prob - reference`` (J. Schulman, "Approximating KL
    divergence", 2020; GRPO, arXiv:2402.03300, eq. 4): never negative, 0 where both agree. Below
    ``d = -max_fall`` it continues as its tangent, so that a token's gradient is at most
    ``exp(max_fall) - 1`` and never 0; ``None`` for no tangent. Returns ``(M,)`` nats.
    """
    difference = log_prob - reference
    # ``expm1``: near 0, where most tokens are, ``exp(-d) - 1`` in float32 would keep no digits.
    if max_fall is None:
        return torch.expm1(-difference) + difference
    near = difference.clamp_min(-max_fall)
    # Beyond the clamp, whose gradient is 0, the line still pulls a lost token back.
    return torch.expm1(-near) + near + math.expm1(max_fall) * (near - difference)


@dataclass(frozen=True, kw_only=True)
class ClippedPolicyLoss(PolicyLoss):
    """The clipped policy objective with the divergence :func:`k3` (TraceRL, arXiv:2509.06949).

    Args:
        clip: how far a ratio may rise or fall before its gradient is cut.
        beta: weight of the divergence.
        max_fall: nats that a log-probability may fall before the divergence continues as a straight
            line. Else its gradient grows with the inverse probability, and a single token that the
            policy has given up decides an update. ``null`` for no line, as in dLLM-RL.
    """

    clip: float = 0.2
    beta: float = 0.01
    max_fall: float | None = 2.5

    def __post_init__(self) -> None:
        within("[0, 1]", clip=self.clip)
        at_least(0, beta=self.beta, max_fall=self.max_fall)

    @property
    def bounds(self) -> tuple[float, float]:
        """The ratios beyond which the gradient is cut."""
        return 1.0 - self.clip, 1.0 + self.clip

    def divergence(self, log_prob: Tensor, reference: Tensor) -> Tensor:
        """Returns ``(M,)`` divergences, from log-probabilities under the policy and another one."""
        return k3(log_prob, reference, max_fall=self.max_fall)

    def compute(
        self,
        log_prob: Tensor,
        old_log_prob: Tensor,
        advantage: Tensor,
        weight: Tensor,
        *,
        reference: Tensor | None = None,
        kl_weight: Tensor | None = None,
    ) -> LossTerms:
        """Adds up the policy term and the divergence from ``reference`` or the old policy.

        In ``parts`` are ``policy`` and, over the tokens with weight, ``ratio`` (mean),
        ``clip_fraction`` (share whose gradient is cut) and ``kl`` (nats per token).
        """
        counted = weight > 0
        # Tokens without weight may hold anything. Masked before products, not after: 0 * inf is
        # NaN, and a NaN that a ``where`` hides in the forward comes back in its gradient.
        log_prob = torch.where(counted, log_prob, 0.0)
        difference = torch.where(counted, log_prob - old_log_prob.detach(), 0.0)
        # The old log-probability is that of the same batch in the same forward, so the first ratio
        # is exactly 1, in any precision.
        ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        low, high = self.bounds
        bounded = ratio.clamp(low, high)
        # The smaller gain (PPO, 1707.06347, eq. 7): a ratio beyond the bound has no gradient where
        # it has gone the right way, and keeps it where it has to come back.
        gain = torch.minimum(ratio * advantage, bounded * advantage)
        policy = -(weight * torch.where(counted, gain, 0.0)).sum()
        anchor = old_log_prob if reference is None else reference
        anchor = torch.where(counted, anchor.detach(), 0.0)
        divergence = self.divergence(log_prob, anchor)
        divergence_term = ((weight if kl_weight is None else kl_weight) * divergence).sum()
        count = counted.sum().clamp_min(1)
        with torch.no_grad():
            outside = torch.where(advantage >= 0, ratio > high, ratio < low)
            parts = {
                "policy": policy.detach(),
                "ratio": torch.where(counted, ratio, 0.0).sum() / count,
                "clip_fraction": (outside & counted).float().sum() / count,
                "kl": torch.where(counted, divergence, 0.0).sum() / count,
            }
        return LossTerms(policy + self.beta * divergence_term, parts)
