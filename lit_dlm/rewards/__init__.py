"""Rewards: what rollouts are worth, from verdicts, formats and judges."""

from lit_dlm.rewards.base import (
    GroupFilter,
    MeanCorrectnessFilter,
    Reward,
    RewardScore,
    Rollout,
    SpreadFilter,
)
from lit_dlm.rewards.graded import FormatReward, Graded
from lit_dlm.rewards.judge import HttpStepJudge, Judge, StepQuestion
from lit_dlm.rewards.lockstep import LockstepReward
from lit_dlm.rewards.process import ProcessReward
from lit_dlm.rewards.reward_model import RewardModel
from lit_dlm.rewards.rewarder import Rewarder

__all__ = [
    "FormatReward",
    "Graded",
    "GroupFilter",
    "HttpStepJudge",
    "Judge",
    "LockstepReward",
    "MeanCorrectnessFilter",
    "ProcessReward",
    "Reward",
    "RewardModel",
    "RewardScore",
    "Rewarder",
    "Rollout",
    "SpreadFilter",
    "StepQuestion",
]
