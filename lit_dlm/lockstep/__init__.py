"""Lockstep R/A decoding: reasoning and answer regions that are decoded together."""

from lit_dlm.lockstep.policy import (
    BonusPolicy as BonusPolicy,
    GaussSeidelPolicy as GaussSeidelPolicy,
    JacobiPolicy as JacobiPolicy,
    LaggedPolicy as LaggedPolicy,
)
from lit_dlm.lockstep.reward import LockstepReward as LockstepReward
