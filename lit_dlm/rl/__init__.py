"""Reinforcement learning: rollouts, samples, the RL step, advantages, policy losses, the module."""

from lit_dlm.rl.advantages import (
    Advantage as Advantage,
    GroupZScore as GroupZScore,
    LeaveOneOut as LeaveOneOut,
    RawReward as RawReward,
    StepGAE as StepGAE,
)
from lit_dlm.rl.espo import ESPO as ESPO
from lit_dlm.rl.module import TraceRLModule as TraceRLModule
from lit_dlm.rl.policy_losses import (
    ClippedPolicyLoss as ClippedPolicyLoss,
    PolicyLoss as PolicyLoss,
)
from lit_dlm.rl.spg import SPG as SPG
from lit_dlm.rl.wd1 import (
    SoftmaxWeights as SoftmaxWeights,
    WeightedLikelihood as WeightedLikelihood,
)
