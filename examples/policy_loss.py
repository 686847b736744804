"""A policy loss of your own: REINFORCE, the log-probability times the advantage (Williams, 1992).

In the folder of this file, use these lines with
``lit-dlm fit --config exp/tracerl_tiny --config FILE``::

    model:
      init_args:
        policy_loss: policy_loss.Reinforce

An advantage compares the responses of a group (``advantage.py``).
"""

from __future__ import annotations

from torch import Tensor

from lit_dlm.training.terms import LossTerms


class Reinforce:
    """REINFORCE, without a probability ratio or a divergence."""

    has_divergence = False  # objective.kl_to would have no effect, and is refused

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
        """Returns the loss; all tensors are ``(M,)``, and tokens of weight 0 may hold any value."""
        return LossTerms(-(weight * advantage * log_prob)[weight > 0].sum())
