"""LightningDataModules: prompts, rollouts, responses, trajectories, generated pre-training text."""

from lit_dlm.datamodules.pretraining import PretrainDataModule
from lit_dlm.datamodules.prompts import PromptDataModule
from lit_dlm.datamodules.rollouts import RolloutDataModule
from lit_dlm.datamodules.supervised import SupervisedDataModule
from lit_dlm.datamodules.trajectories import TrajectoryDataModule

__all__ = [
    "PretrainDataModule",
    "PromptDataModule",
    "RolloutDataModule",
    "SupervisedDataModule",
    "TrajectoryDataModule",
]
