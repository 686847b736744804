"""ESPO: a whole response is one action, and its log-probability is its evidence lower bound."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from lit_dlm.rl.policy_losses import ClippedPolicyLoss


@dataclass(frozen=True, kw_only=True)
class ESPO(ClippedPolicyLoss):
    """Clipped ratio of responses with the divergence ``k2`` (ESPO, arXiv:2512.03759, section 4).

    For a response of ``L`` tokens the ratio is ``exp((ELBO - ELBO_old) / L)``. The divergence is
    ``(ELBO - ELBO_reference)^2 / 2`` per token, that is ``L d^2 / 2`` if they differ by ``d`` nats
    per token. ``L`` counts the answer up to its end; the release also scores the fill after it.

    Args:
        clip: how far a ratio may rise or fall before its gradient is cut.
        beta: weight of the divergence.
    """

    needs_bounds: ClassVar[bool] = True
    max_fall: None = field(default=None, init=False)

    def divergence(self, log_prob: Tensor, reference: Tensor) -> Tensor:
        # A square has no exponential whose gradient a line (``max_fall``) would have to bound.
        return (log_prob - reference) ** 2 / 2
