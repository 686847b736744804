"""Reinforcement learning: rollouts, items, the RL step, advantages, policy losses, the module."""

from lit_dlm.rl.advantages import Advantage, GroupZScore, LeaveOneOut, RawReward, StepGAE
from lit_dlm.rl.module import TraceRLModule
from lit_dlm.rl.policy_losses import ClippedPolicyLoss, PolicyLoss
from lit_dlm.rl.step import rl_step

__all__ = [
    "Advantage",
    "ClippedPolicyLoss",
    "GroupZScore",
    "LeaveOneOut",
    "PolicyLoss",
    "RawReward",
    "StepGAE",
    "TraceRLModule",
    "rl_step",
]
