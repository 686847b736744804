"""The command line: ``lit-dlm fit | validate | test | predict``, a LightningCLI."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

# Read by webdataset when it is imported: refuse pickles and shell commands in shards.
os.environ.setdefault("WDS_SECURE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from jsonargparse import set_parsing_settings
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

import callbacks  # noqa: F401  (makes short class names known)
import datamodules  # noqa: F401
from lit_dlm import modules, tasks  # noqa: F401
from lit_dlm.configuration import explain

BASE_CONFIG = Path(__file__).resolve().parent / "configs" / "base.yaml"


class Parser(LightningArgumentParser):
    """Argument parser whose errors say what is wrong, where, and what was probably meant."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Prints one short error and exits with status 2."""
        sys.stderr.write(f"lit-dlm: error: {explain(message, self)}\n")
        raise SystemExit(2)


class RunConfigCallback(SaveConfigCallback):
    """Saves the resolved configuration as ``{run_dir}/{subcommand}.yaml``; it re-runs as is."""

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Writes the file on rank 0 (``setup`` of the base class sees to that)."""
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        text = self.parser.dump(self.config, skip_none=False)
        (folder / f"{trainer.state.fn}.yaml").write_text(text)


class CLI(LightningCLI):
    """LightningCLI with a run folder and the project's base configuration."""

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Builds parsers that explain their errors."""
        return Parser(**kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds what configurations may refer to as ``${run_dir}``."""
        parser.add_argument(
            "--run_dir", type=str, default="runs/default", help="Folder that receives all results."
        )


def main(args: list[str] | None = None) -> None:
    """Runs the command line.

    Args:
        args: the arguments; those of the process by default.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # References such as ${run_dir} must work below the subcommand that Lightning adds.
    set_parsing_settings(omegaconf_absolute_to_relative_paths=True)
    defaults = [str(BASE_CONFIG)] if BASE_CONFIG.exists() else []
    subcommands = ("fit", "validate", "test", "predict")
    arguments = sys.argv[1:] if args is None else args
    sys.argv = [sys.argv[0], *arguments]
    try:
        CLI(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            save_config_callback=RunConfigCallback,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={
                "parser_mode": "omegaconf+",
                **{name: {"default_config_files": defaults} for name in subcommands},
            },
        )
    except (ValueError, OSError, PermissionError) as error:
        if os.environ.get("LIT_DLM_TRACEBACK"):
            raise
        sys.stderr.write(f"lit-dlm: error: {error}\n")
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
