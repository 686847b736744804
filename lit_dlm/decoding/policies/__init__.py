"""Commit policies: which of the proposed tokens become final."""

from lit_dlm.decoding.policies.base import CommitPolicy
from lit_dlm.decoding.policies.threshold import ThresholdPolicy
from lit_dlm.decoding.policies.topk import (
    ConfidencePolicy,
    EntropyPolicy,
    MarginPolicy,
    RandomPolicy,
)

__all__ = [
    "CommitPolicy",
    "ConfidencePolicy",
    "EntropyPolicy",
    "MarginPolicy",
    "RandomPolicy",
    "ThresholdPolicy",
]
