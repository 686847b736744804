"""LightningDataModules: prompts, rollouts, responses, trajectories, generated pre-training text."""

from lit_dlm.datamodules.pretraining import PretrainDataModule as PretrainDataModule
from lit_dlm.datamodules.prompts import PromptDataModule as PromptDataModule
from lit_dlm.datamodules.rollouts import RolloutDataModule as RolloutDataModule
from lit_dlm.datamodules.supervised import SupervisedDataModule as SupervisedDataModule
from lit_dlm.datamodules.supervised_sources import (
    PreferencesFile as PreferencesFile,
    RecordedDecodes as RecordedDecodes,
    RecordedPairs as RecordedPairs,
    ResponsesFile as ResponsesFile,
    ResponsesList as ResponsesList,
)
from lit_dlm.datamodules.trajectories import TrajectoryDataModule as TrajectoryDataModule
