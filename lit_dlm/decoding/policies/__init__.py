"""Commit policies: which of the proposed tokens become final."""

from lit_dlm.decoding.policies.base import CommitPolicy
from lit_dlm.decoding.policies.entropy_bound import EntropyBoundedPolicy
from lit_dlm.decoding.policies.threshold import DynamicPolicy, ThresholdPolicy
from lit_dlm.decoding.policies.topk import (
    ConfidencePolicy,
    EntropyPolicy,
    MarginPolicy,
    RandomPolicy,
    SequentialPolicy,
)

__all__ = [
    "CommitPolicy",
    "ConfidencePolicy",
    "DynamicPolicy",
    "EntropyBoundedPolicy",
    "EntropyPolicy",
    "MarginPolicy",
    "RandomPolicy",
    "SequentialPolicy",
    "ThresholdPolicy",
]
