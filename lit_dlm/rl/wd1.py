"""wd1: a weighted log-likelihood of the responses, without ratios."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_dlm.rl.advantages import Advantage
from lit_dlm.rl.policy_losses import PolicyLoss
from lit_dlm.training.terms import LossTerms


class SoftmaxWeights(Advantage):
    """``w+ - w-``: softmax over a group of the centred rewards, less that of their negatives.

    wd1 (arXiv:2507.08838, section 3; ``psi`` is 1, as in its code): right responses become more
    probable, wrong ones less, and the weights of average ones cancel. Multiplied by the number of
    responses, so that a mean over responses is the source's sum over a group.
    """

    def compute(self, rewards: Tensor) -> Tensor:
        centred = rewards - rewards.mean()
        return len(rewards) * (centred.softmax(0) - (-centred).softmax(0))


class WeightedLikelihood(PolicyLoss):
    """``-A log p``, where ``A`` is the weight of wd1's loss with ``SoftmaxWeights``.

    Neither an old nor a reference policy is used, as in the source's code.
    """

    has_divergence: ClassVar[bool] = False

    def compute(
        self, log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, weight: Tensor, **_: Any
    ) -> LossTerms:
        # Tokens without weight may hold anything, and 0 * inf is NaN.
        log_prob = torch.where(weight > 0, log_prob, 0.0)
        total = -(weight * torch.where(weight > 0, advantage, 0.0) * log_prob).sum()
        count = (weight > 0).sum().clamp_min(1)
        parts = {"policy": total.detach(), "log_prob": log_prob.detach().sum() / count}
        return LossTerms(total, parts)
