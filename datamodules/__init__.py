"""LightningDataModules: prompts, trajectories and generated pre-training text."""

from datamodules.prompts import PromptDataModule

__all__ = ["PromptDataModule"]
