"""The command line: ``lit-dlm fit|validate|test|predict`` (LightningCLI) and commands beside it."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import Any

# Read by webdataset when it is imported: refuse pickles and shell commands in shards.
os.environ.setdefault("WDS_SECURE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from jsonargparse import set_parsing_settings
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

# Imported so that configurations may use short class names.
import callbacks
import datamodules  # noqa: F401
import lit_dlm.backbones.hf
import lit_dlm.decoding.policies.tracelock
import lit_dlm.modules
import lit_dlm.rewards
import lit_dlm.tasks
import lit_dlm.toy  # noqa: F401
from lit_dlm import download as downloading
from lit_dlm import recipes
from lit_dlm.config_files import FOLDER
from lit_dlm.configuration import Parser, RunConfigCallback, explain
from lit_dlm.profile import command as profiling
from lit_dlm.reports.command import main as report
from lit_dlm.reports.compare_command import main as compare
from lit_dlm.reports.viewer_command import main as view
from lit_dlm.trajectories.commands import main as traj

COMMANDS = {
    "report": report,
    "traj": traj,
    "view": view,
    "compare": compare,
    "profile": lambda arguments: profiling.main(arguments, predict=main),
    "recipes": recipes.main,
    "download": lambda arguments: downloading.main(arguments, parse=main),
}
"""Commands beside the LightningCLI: each takes its arguments and returns the exit status."""

BASE_CONFIG = FOLDER / "base.yaml"


class CLI(LightningCLI):
    """LightningCLI with a run folder and the project's base configuration."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds what configurations may refer to as ``${run_dir}``."""
        parser.add_argument(
            "--run_dir", type=str, default="runs/default", help="Folder that receives all results."
        )
        parser.add_argument(
            "--tf32", type=bool, default=False, help="Whether GPUs multiply float32 in TF32."
        )

    def before_instantiate_classes(self) -> None:
        """Sets the precision of float32 products on GPUs, as a release's ``enable_tf32`` does."""
        torch.backends.cuda.matmul.allow_tf32 = self.config[self.subcommand].tf32

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Adds the progress bar unless it is switched off."""
        if self.config_init[self.subcommand].trainer.enable_progress_bar is not False:
            self.trainer_defaults["callbacks"] = callbacks.ProgressBar()
        return super().instantiate_trainer(**kwargs)

    def before_predict(self) -> None:
        """Predictions go to disk batch by batch; none is kept in memory."""
        self.config_init["predict"]["return_predictions"] = False


def main(args: list[str] | None = None) -> None:
    """Runs the command line.

    Args:
        args: the arguments; those of the process by default.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # ``--ckpt_path last`` means "go on if there is something"; RunConfigCallback tells if not.
    warnings.filterwarnings("ignore", message=r".*\.fit.*there is no last checkpoint available.*")
    # Advertisements for other services, and a deprecation inside Lightning itself.
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "Tip:" not in record.getMessage()
    )
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")
    # References such as ${run_dir} must work below the subcommand that Lightning adds.
    set_parsing_settings(omegaconf_absolute_to_relative_paths=True)
    defaults = [str(BASE_CONFIG)]
    subcommands = ("fit", "validate", "test", "predict")
    arguments = sys.argv[1:] if args is None else args
    try:
        if arguments and arguments[0] in COMMANDS:
            raise SystemExit(COMMANDS[arguments[0]](arguments[1:]))
        if not BASE_CONFIG.is_file():
            raise FileNotFoundError(f"{BASE_CONFIG}: the defaults of every run are missing")
        sys.argv = [sys.argv[0], *arguments]
        CLI(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            parser_class=Parser,
            save_config_callback=RunConfigCallback,
            save_config_kwargs={"overwrite": True, "save_to_log_dir": False},
            parser_kwargs={
                "parser_mode": "omegaconf+",
                **{name: {"default_config_files": defaults} for name in subcommands},
            },
        )
    except (ValueError, OSError, PermissionError) as error:
        if os.environ.get("LIT_DLM_TRACEBACK"):
            raise
        sys.stderr.write(f"lit-dlm: error: {explain(str(error))}\n")
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
