"""LightningDataModules: prompts, responses, trajectories and generated pre-training text."""

from datamodules.pretraining import PretrainDataModule
from datamodules.prompts import PromptDataModule
from datamodules.supervised import SupervisedDataModule
from datamodules.trajectories import TrajectoryDataModule

__all__ = ["PretrainDataModule", "PromptDataModule", "SupervisedDataModule", "TrajectoryDataModule"]
