"""Rewards: what rollouts are worth, from verdicts, formats and judges."""

from lit_dlm.rewards.base import (
    GroupFilter as GroupFilter,
    MeanCorrectnessFilter as MeanCorrectnessFilter,
    Reward as Reward,
    RewardScore as RewardScore,
    Rollout as Rollout,
    SpreadFilter as SpreadFilter,
)
from lit_dlm.rewards.graded import FormatReward as FormatReward, Graded as Graded
from lit_dlm.rewards.judge import HttpStepJudge as HttpStepJudge
from lit_dlm.rewards.process import ProcessReward as ProcessReward
from lit_dlm.rewards.reward_model import RewardModel as RewardModel
from lit_dlm.rewards.rewarder import Rewarder as Rewarder
