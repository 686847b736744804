"""SPG: a policy gradient between two bounds on the log-likelihood of a response."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from lit_dlm.rl.batch import RolloutBatch
from lit_dlm.rl.wd1 import WeightedLikelihood
from lit_dlm.system.options import within


class SPG(WeightedLikelihood):
    """``-A L(x)``, ``L`` the evidence lower bound if ``A > 0``, else its mix with an upper bound.

    Sandwiched policy gradient (arXiv:2510.09541, section 3). The Renyi upper bound of a token is
    ``log(mean_j 1[hidden] p_j^beta / t_j) / beta`` over the states ``j``, where ``t_j`` is the
    share of a state's positions that are hidden; that of a response is the mean over its tokens.
    The states are those of ``BoundViews``, with ``block_size`` those of the release, which also
    masks prompts and weights responses by their length.

    Args:
        beta: order of the upper bound (1 to 2 in the release).
        mix: share of the upper bound where ``A <= 0``, the rest being the lower one; 1 for the
            upper one alone.
    """

    needs_bounds: ClassVar[bool] = True

    def __init__(self, beta: float = 1.5, mix: float = 0.5) -> None:
        within("[1, inf)", beta=beta)
        within("[0, 1]", mix=mix)
        self.beta, self.mix = beta, mix

    def estimate(self, log_prob: Tensor, batch: RolloutBatch) -> Tensor:
        """Returns each response's bound in nats per token; the lower until advantages are known."""
        lower = batch.per_token(log_prob)
        if batch.tokens.advantage is None:
            return lower
        # A response to be made less probable is pushed down by a bound from above: lowering the
        # bound from below would only make it looser.
        upper = upper_bound(log_prob, batch, beta=self.beta)
        mixed = self.mix * upper + (1.0 - self.mix) * lower
        return torch.where(batch.tokens.advantage > 0, lower, mixed)


def upper_bound(log_prob: Tensor, batch: RolloutBatch, *, beta: float) -> Tensor:
    """Returns ``(M,)`` Renyi bounds in nats per token, given ``(N,)`` scores of hidden positions.

    Tokens that no state hides are left out of the mean, as in the release.
    """
    assert batch.token is not None
    assert batch.coefficient is not None
    supervised = batch.states.supervised
    _, position = supervised.nonzero(as_tuple=True)
    # What has one weight is a whole response, so a token is numbered by its response and position.
    token = batch.token * supervised.shape[1] + position
    tokens, token = token.unique(return_inverse=True)
    response = tokens.div(supervised.shape[1], rounding_mode="floor")
    seen = response.bincount(minlength=len(batch.tokens.weight))
    # A coefficient is that of a mean over the answer's tokens; times their number: 1 / (n t).
    length = batch.responses.maskable.sum(1)[batch.tokens.response]
    share = batch.coefficient.to(log_prob.dtype).log() + length.log()[batch.token]
    scaled = beta * log_prob + share
    # Exponentials relative to the largest: beta times a small log-probability would vanish.
    top = scaled.new_full((len(tokens),), -torch.inf)
    top = top.scatter_reduce(0, token, scaled.detach(), "amax")
    summed = scaled.new_zeros(len(tokens)).index_add(0, token, (scaled - top[token]).exp())
    bounds = (summed.log() + top) / beta
    return bounds.new_zeros(len(seen)).index_add(0, response, bounds) / seen.clamp_min(1)
