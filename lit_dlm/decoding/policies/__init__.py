"""Commit policies: which of the proposed tokens become final."""

from lit_dlm.decoding.policies.base import CommitPolicy
from lit_dlm.decoding.policies.lockstep import (
    BonusPolicy,
    GaussSeidelPolicy,
    JacobiPolicy,
    LaggedPolicy,
)
from lit_dlm.decoding.policies.threshold import DynamicPolicy, EntropyBoundedPolicy, ThresholdPolicy
from lit_dlm.decoding.policies.topk import (
    ConfidencePolicy,
    EntropyPolicy,
    MarginPolicy,
    NoisyConfidencePolicy,
    RandomPolicy,
    SequentialPolicy,
)
