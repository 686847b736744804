"""Commit policies: which of the proposed tokens become final."""

from lit_dlm.decoding.policies.base import (
    CommitPolicy as CommitPolicy,
    ConfidencePolicy as ConfidencePolicy,
    DynamicPolicy as DynamicPolicy,
    EBSamplerPolicy as EBSamplerPolicy,
    EntropyBoundedPolicy as EntropyBoundedPolicy,
    EntropyPolicy as EntropyPolicy,
    FactorPolicy as FactorPolicy,
    MarginPolicy as MarginPolicy,
    NoisyConfidencePolicy as NoisyConfidencePolicy,
    RandomPolicy as RandomPolicy,
    SequentialPolicy as SequentialPolicy,
    ThresholdPolicy as ThresholdPolicy,
)
from lit_dlm.decoding.policies.calibrated import PCSamplerPolicy as PCSamplerPolicy
from lit_dlm.decoding.policies.editing import TokenEditingPolicy as TokenEditingPolicy
from lit_dlm.decoding.policies.history import (
    CreditPolicy as CreditPolicy,
    KLASSPolicy as KLASSPolicy,
)
from lit_dlm.decoding.policies.lockstep import (
    BonusPolicy as BonusPolicy,
    GaussSeidelPolicy as GaussSeidelPolicy,
    JacobiPolicy as JacobiPolicy,
    LaggedPolicy as LaggedPolicy,
)
from lit_dlm.decoding.policies.remdm import ReMDMPolicy as ReMDMPolicy
from lit_dlm.decoding.policies.wino import WINOPolicy as WINOPolicy
