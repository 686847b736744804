"""Confidence threshold decoding."""

from __future__ import annotations

from torch import Tensor

from lit_dlm.decoding.policies.base import CommitPolicy
from lit_dlm.decoding.state import DecodeState, Proposal, Selection
from lit_dlm.ops.scores import top_quota


class ThresholdPolicy(CommitPolicy):
    """Commits every candidate whose probability reaches a threshold (Fast-dLLM, arXiv 2505.22618).

    A row in which none does is left to the stall rule, which commits its best one. With a quota,
    a row in which fewer qualify commits its best ``quota`` instead (the dynamic remasking of
    dLLM-RL's block sampler), so it is never slower than the quota alone.
    """

    requires: frozenset[str] = frozenset()
    forwards_per_step = 0

    def __init__(self, threshold: float = 0.9) -> None:
        """Sets the probability from which a proposal is committed."""
        if not 0.0 <= threshold <= 1.0:
            raise ValueError(f"threshold: expected a probability in 0..1, got {threshold}")
        self.threshold = threshold

    def select(
        self, state: DecodeState, candidates: Tensor, proposal: Proposal, quota: Tensor | None
    ) -> Selection:
        """Commits all candidates at or above the threshold."""
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

    def select(
        self, state: DecodeState, candidates: Tensor, proposal: Proposal, quota: Tensor | None
    ) -> Selection:
        """Commits all candidates over the threshold, at least ``quota``.

        Raises:
            ValueError: the decode has no quota.
        """
        if quota is None:
            raise ValueError(
                "quota: DynamicPolicy needs one (EvenQuota with steps_per_block), got NoQuota"
            )
        commit = candidates & (proposal.prob > self.threshold)
        return Selection(commit | top_quota(proposal.prob, candidates, quota), proposal.prob)
