"""Commit policies: which of the proposed tokens become final."""

from lit_dlm.decoding.policies.base import CommitPolicy
from lit_dlm.decoding.policies.lockstep import (
    BonusPolicy,
    GaussSeidelPolicy,
    JacobiPolicy,
    LaggedPolicy,
)
from lit_dlm.decoding.policies.training_free import (
    ConfidencePolicy,
    DynamicPolicy,
    EntropyBoundedPolicy,
    EntropyPolicy,
    MarginPolicy,
    NoisyConfidencePolicy,
    RandomPolicy,
    SequentialPolicy,
    ThresholdPolicy,
)
