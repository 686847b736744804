"""LightningDataModules: prompts, trajectories and generated pre-training text."""

from datamodules.pretraining import PretrainDataModule
from datamodules.prompts import PromptDataModule
from datamodules.trajectories import TrajectoryDataModule

__all__ = ["PretrainDataModule", "PromptDataModule", "TrajectoryDataModule"]
