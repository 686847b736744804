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
