"""Reveals bounded by their joint entropy."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_dlm.decoding.policies.base import CommitPolicy
from lit_dlm.decoding.state import DecodeState, Proposal, Selection
from lit_dlm.ops.scores import rank_descending


class EntropyBoundedPolicy(CommitPolicy):
    """Commits the surest candidates while the sum of their entropies stays under a bound.

    Tokens that are committed together are drawn as if they were independent; the error of that is
    bounded by their joint entropy (EB-Sampler, arXiv 2505.24857). This is the rule
    ``entropy_bounded`` of dLLM-RL's engine: the plain sum, at least one commit. The paper leaves
    the largest entropy of the set out of its sum.
    """

    requires = frozenset({"entropy"})
    forwards_per_step = 0

    def __init__(self, bound: float = 0.35) -> None:
        """Sets the bound.

        Args:
            bound: in nats, above 0; dLLM-RL's default is 0.35.
        """
        if not bound > 0.0:
            raise ValueError(f"bound: expected a number above 0, got {bound}")
        self.bound = bound

    def select(
        self, state: DecodeState, candidates: Tensor, proposal: Proposal, quota: Tensor | None
    ) -> Selection:
        """Commits in order of entropy; with a quota, at least the best ``quota`` ones."""
        assert proposal.entropy is not None
        ranks = rank_descending(-proposal.entropy, candidates)
        entropy = proposal.entropy.masked_fill(~candidates, 0.0)
        # Column ``r`` of the sorted row holds the sum of the ``r + 1`` smallest entropies.
        ordered = torch.zeros_like(entropy).scatter_(1, ranks, entropy)
        total = ordered.cumsum(1).gather(1, ranks)
        least = 1 if quota is None else quota.clamp_min(1)[:, None]
        commit = candidates & ((total < self.bound) | (ranks < least))
        return Selection(commit, -proposal.entropy)
