"""A policy loss of your own: REINFORCE, the log-probability times the advantage (Williams, 1992).

In the folder of this file::

    model:
      init_args:
        policy_loss: policy_loss.Reinforce

for ``lit-dlm fit --config exp/tracerl_tiny --config FILE``. What compares the responses of a group
is an advantage (``advantage.py``).
"""

from __future__ import annotations

from torch import Tensor

from lit_dlm.losses.terms import LossTerms


class Reinforce:
    """No ratio and no divergence."""

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
        """All are ``(M,)``, of the tokens of a batch; cells of weight 0 may hold anything."""
        return LossTerms(-(weight * advantage * log_prob)[weight > 0].sum())
