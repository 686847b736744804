"""LightningDataModules: prompts, rollouts, responses, trajectories, generated pre-training text."""

from datamodules.pretraining import PretrainDataModule
from datamodules.prompts import PromptDataModule
from datamodules.rollouts import RolloutDataModule
from datamodules.supervised import SupervisedDataModule
from datamodules.trajectories import TrajectoryDataModule

__all__ = [
    "PretrainDataModule",
    "PromptDataModule",
    "RolloutDataModule",
    "SupervisedDataModule",
    "TrajectoryDataModule",
]
