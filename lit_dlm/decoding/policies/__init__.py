"""Commit policies: which of the proposed tokens become final."""

from lit_dlm.decoding.policies.base import CommitPolicy as CommitPolicy
from lit_dlm.decoding.policies.lockstep import (
    BonusPolicy as BonusPolicy,
    GaussSeidelPolicy as GaussSeidelPolicy,
    JacobiPolicy as JacobiPolicy,
    LaggedPolicy as LaggedPolicy,
)
from lit_dlm.decoding.policies.training_free import (
    ConfidencePolicy as ConfidencePolicy,
    DynamicPolicy as DynamicPolicy,
    EntropyBoundedPolicy as EntropyBoundedPolicy,
    EntropyPolicy as EntropyPolicy,
    MarginPolicy as MarginPolicy,
    NoisyConfidencePolicy as NoisyConfidencePolicy,
    RandomPolicy as RandomPolicy,
    SequentialPolicy as SequentialPolicy,
    ThresholdPolicy as ThresholdPolicy,
)
