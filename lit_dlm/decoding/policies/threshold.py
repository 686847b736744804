"""Thresholds: on every probability, or on the joint entropy of what is committed together."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_dlm.decoding.policies.base import CommitPolicy
from lit_dlm.decoding.state import DecodeState, Proposal, Selection
from lit_dlm.ops.options import within
from lit_dlm.ops.scores import rank_descending, top_quota


class ThresholdPolicy(CommitPolicy):
    """Commits every candidate whose probability reaches a threshold (Fast-dLLM, arXiv 2505.22618).

    A row in which none does is left to the stall rule, which commits its best one. With a quota,
    a row in which fewer qualify commits its best ``quota`` instead (the dynamic remasking of
    dLLM-RL's block sampler), so it is never slower than the quota alone.
    """

    def __init__(self, threshold: float = 0.9) -> None:
        within("[0, 1]", threshold=threshold)
        self.threshold = threshold

    def select(
        self, state: DecodeState, candidates: Tensor, proposal: Proposal, quota: Tensor | None
    ) -> Selection:
        commit = candidates & (proposal.prob >= self.threshold)
        if quota is not None:
            commit = commit | top_quota(proposal.prob, candidates, quota)
        return Selection(commit, proposal.prob)


class DynamicPolicy(ThresholdPolicy):
    """Dynamic remasking of dLLM-RL's block sampler (``low_confidence_dynamic``, arXiv 2509.06949).

    Commits every candidate whose probability is *over* the threshold; where fewer than the quota
    are, the best ``quota`` ones. So it is never slower than static remasking, which is
    ``ConfidencePolicy`` with the same quota.
    """

    needs_quota = True

    def select(
        self, state: DecodeState, candidates: Tensor, proposal: Proposal, quota: Tensor | None
    ) -> Selection:
        assert quota is not None
        commit = candidates & (proposal.prob > self.threshold)
        return Selection(commit | top_quota(proposal.prob, candidates, quota), proposal.prob)


class EntropyBoundedPolicy(CommitPolicy):
    """Commits the surest candidates while the sum of their entropies stays under a bound.

    Tokens that are committed together are drawn as if they were independent; the error of that is
    bounded by their joint entropy (EB-Sampler, arXiv 2505.24857). This is the rule
    ``entropy_bounded`` of dLLM-RL's engine: the plain sum, at least one commit. The paper leaves
    the largest entropy of the set out of its sum.
    """

    requires = frozenset({"entropy"})

    def __init__(self, bound: float = 0.35) -> None:
        """Sets the bound in nats; 0.35 is dLLM-RL's."""
        within("(0, inf)", bound=bound)
        self.bound = bound

    def select(
        self, state: DecodeState, candidates: Tensor, proposal: Proposal, quota: Tensor | None
    ) -> Selection:
        assert proposal.entropy is not None
        ranks = rank_descending(-proposal.entropy, candidates)
        entropy = proposal.entropy.masked_fill(~candidates, 0.0)
        # Column ``r`` of the sorted row holds the sum of the ``r + 1`` smallest entropies.
        ordered = torch.zeros_like(entropy).scatter_(1, ranks, entropy)
        total = ordered.cumsum(1).gather(1, ranks)
        least = 1 if quota is None else quota.clamp_min(1)[:, None]
        commit = candidates & ((total < self.bound) | (ranks < least))
        return Selection(commit, -proposal.entropy)
