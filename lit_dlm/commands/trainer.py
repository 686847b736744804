"""``lit-dlm fit``, ``validate`` and ``predict``: the LightningCLI of this project."""

from __future__ import annotations

import logging
import os
import re
import shlex
import socket
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from pydoc import locate
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lit_dlm.callbacks
from lit_dlm.commands.memory import check_run
from lit_dlm.config.components import raised_in
from lit_dlm.config.files import Composed
from lit_dlm.config.parser import Parser, explain
from lit_dlm.config.saved import LAST, RunConfigCallback, claim
from lit_dlm.predict.decode import DecodeModule
from lit_dlm.system.files import write_atomically
from lit_dlm.system.locks import locked, state_file
from lit_dlm.system.options import refuse
from lit_dlm.system.terminal import printable
from lit_dlm.tracelock.module import TraceLockModule
from lit_dlm.tracelock.outcome import TraceLockRLModule
from lit_dlm.training.checkpoint import last_checkpoint, local, use_own_files

logger = logging.getLogger(__name__)

_BASES: dict[str, type] = {"model": LightningModule, "data": LightningDataModule}
_NEEDED = {
    "fit": {"model": "training_step", "data": "train_dataloader"},
    "predict": {"model": "predict_step", "data": "predict_dataloader"},
}
"""Methods that a command calls, and that Lightning's base classes do not implement."""
# Outlives the command line object: it is let go when the command has ended, whatever ended it.
_held = ExitStack()  # the lock of the run folder


class CLI(LightningCLI):
    """LightningCLI with a run folder and the project's base configuration."""

    lock: Path | None = None  # file that exists while the first process of a run does

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--run_dir", type=str, help="Folder that receives all results.")
        parser.add_argument("--tf32", type=bool, default=False, help="Whether GPUs may use TF32.")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        assert isinstance(parser, Parser)
        # Lightning hands over what `_cli` was given as `args`: files and flags are joined already.
        self.document = args.document
        self.config = parser.parse_composed(args, sys.argv[1])

    def before_instantiate_classes(self) -> None:
        options = self.config[self.subcommand]
        _check_fit(str(self.subcommand), options)
        # First of all, before a lock or a file: a model that cannot fit would be killed by the
        # system while it is built, which may take minutes and leaves no message.
        planned = check_run(options.as_dict(), trains=self.subcommand == "fit")
        if planned is not None:
            rank_zero_only(logger.info)(planned)
        if self.subcommand in ("fit", "predict") and not options.trainer.fast_dev_run:
            # Other processes of the run share the folder, so the first one alone locks it. The
            # claim is read under the lock: of two fits that begin together one sees the other's.
            self.lock = rank_zero_only(_held.enter_context)(
                locked(Path(options.run_dir), self.subcommand)
            )
            if self.subcommand == "fit":
                self._dump_config()
                rank_zero_only(claim)(self.config_dump, self.document)
        torch.backends.cuda.matmul.allow_tf32 = options.tf32

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        # Each subcommand's options are those of the trainer again.
        called = sys.argv[1]  # the other subcommands' options would take longer to add
        left_out = "weights_only"  # the option lets a checkpoint run code
        return {called: {*LightningCLI.subcommands()[called], left_out}}

    def _parse_ckpt_path(self) -> None:
        """Keeps the command line's settings, where Lightning would take those of a checkpoint."""

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        given = self.config_init[self.subcommand].trainer
        if given.fast_dev_run:  # leaves no files, so Lightning drops its own savers and loggers
            listed = given.callbacks if isinstance(given.callbacks, list) else [given.callbacks]
            given.callbacks = [x for x in listed if not getattr(x, "writes_files", x is None)]
        # Defaults, not configuration: a file's list of callbacks is added to them.
        own = [lit_dlm.callbacks.Interruption(self.lock), lit_dlm.callbacks.TrainingLog()]
        self.trainer_defaults["callbacks"] = own
        if given.enable_progress_bar is not False:
            self.trainer_defaults["callbacks"].append(lit_dlm.callbacks.ProgressBar())
        trainer = super().instantiate_trainer(**kwargs)
        _check_port(trainer)
        use_own_files(trainer)  # for modules from outside the package, too
        return trainer

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        # Found here and not when the command line is parsed: the folders of checkpoints are known
        # once the trainer has been built.
        options = super()._prepare_subcommand_kwargs(subcommand)
        path = options["ckpt_path"]
        if path == LAST:
            folders = [
                Path(saver.dirpath)
                for saver in self.trainer.checkpoint_callbacks
                if isinstance(saver, ModelCheckpoint) and saver.dirpath
            ]
            options["ckpt_path"] = last_checkpoint(folders)
            if options["ckpt_path"] is None:
                names = " or ".join(dict.fromkeys(map(str, folders))) or "any folder of checkpoints"
                if subcommand != "fit":
                    way_out = "run 'lit-dlm fit' with the same --run_dir first, or give a file"
                    raise ValueError(f"ckpt_path: expected {LAST}*.ckpt in {names}; {way_out}")
                rank_zero_only(logger.info)("nothing to go on from in %s, starting anew", names)
        elif path is not None and path != "best":
            options["ckpt_path"] = local(path)
        return options

    def before_predict(self) -> None:
        # Predictions go to disk batch by batch.
        self.config_init["predict"]["return_predictions"] = False

    def after_fit(self) -> None:
        self._end(_decoding(self.model, Path(self.trainer.default_root_dir)))

    def after_predict(self) -> None:
        root = Path(self.trainer.default_root_dir)
        places = {"results": ["report", root], "traces": ["view", root / "traces"]}
        self._end(next((words for name, words in places.items() if (root / name).is_dir()), []))

    def _end(self, words: Sequence[Any]) -> None:
        """Notes that the run is done, and tells the command that goes on with what it made."""
        if self.lock is not None:  # in the first process, of a run that leaves files
            saved = Path(self.trainer.default_root_dir) / f"{self.subcommand}.yaml"
            write_atomically(state_file(saved), "done")
            if words:
                logger.info("next: %s", shlex.join(["lit-dlm", *map(str, words)]))


@rank_zero_only
def _check_port(trainer: Trainer) -> None:
    """Refuses a port that another program listens on: the processes would wait there for ever."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if environment is None or isinstance(environment, TorchElasticEnvironment):
        return  # one process; torchrun listens on the port itself
    port = environment.main_port
    try:
        # Lightning's processes would connect to the other program and wait without a timeout.
        socket.create_server(("", port)).close()
    except OSError as error:
        raise ValueError(
            f"MASTER_PORT: expected a free port, got {port} ({os.strerror(error.errno or 0)}); "
            "without the variable one is found"
        ) from None


def _check_fit(command: str, options: Namespace) -> None:
    if not options.run_dir:  # of a shell's variable that is not set; results would go to the root
        refuse("run_dir", "a folder", "none")
    for key, needed in _NEEDED.get(command, {}).items():
        kind: Any = locate(options[key].class_path)
        if getattr(kind, needed) is getattr(_BASES[key], needed):
            expected = f"a class with {needed}, as {command} asks for"
            refuse(key, expected, kind.__name__, "; this configuration is for another command")
    if not isinstance(options.trainer, Namespace):
        refuse("trainer", "a mapping of the trainer's options", repr(options.trainer))
    # Each of SLURM's tasks is a process with the GPU of its local rank; with --gpus-per-task it
    # sees that GPU alone, as number 0, and all but the first would ask for one that is not there.
    tasks = int(os.environ.get("SLURM_NTASKS_PER_NODE", "1"))
    if tasks > 1 == torch.cuda.device_count() and "SLURM_PROCID" in os.environ:
        hint = "; use --gpus-per-node in place of --gpus-per-task, or --gpu-bind=none beside it"
        refuse("trainer.devices", f"{tasks} GPUs in sight of each task of SLURM", 1, hint)


def _decoding(model: LightningModule, root: Path) -> list[Any]:
    """Returns the words of the command that decodes with what a ``fit`` has exported, if any."""
    source = getattr(getattr(model, "backbone", None), "source", None)  # of an HFBackbone
    exported = Path(getattr(model, "export_dir", None) or root / "policy/best")
    # Without an export_dir: what AdapterCheckpoint and TraceLock write in our configurations.
    places = exported, root / "policy/best", root / "policy/last", root / "policy"
    made = next(filter(Path.is_dir, places), None)
    if made is None or source is None or not isinstance(model, DecodeModule):
        return []
    words = ["generate", "PROMPT", "--backbone"]
    if isinstance(model, TraceLockModule | TraceLockRLModule):
        policy = "--policy=TraceLockPolicy", "--policy.path", made, "--quota=NoQuota"
        return [*words, source.name, *policy]
    if (made / "adapter_config.json").exists():
        return [*words, source.name, "--adapter", made]
    return [*words, made]


class ParsingCLI(CLI):
    """Reads a configuration, and builds nothing."""

    def before_instantiate_classes(self) -> None: ...

    def _set_seed(self) -> None: ...

    def instantiate_classes(self) -> None: ...

    def _run_subcommand(self, subcommand: str) -> None: ...


def parsed(arguments: Sequence[str], composed: Composed) -> dict[str, Any]:
    """Returns the configuration of a subcommand with all of its defaults."""
    return dict(_cli(ParsingCLI, arguments, composed).config[arguments[0]].as_dict())


def main(arguments: Sequence[str], composed: Composed) -> int:
    """Runs a subcommand with its options; returns 1 if a class or a file refused its input."""
    # Lightning passes its messages to the root logger as well, which has a handler here.
    if logging.getLogger().hasHandlers():
        logging.getLogger("lightning").handlers.clear()
    # A deprecation inside Lightning; loaders that iterate over a queue or collate rows in memory.
    for pattern in (
        r"isinstance\(treespec, LeafSpec\)",
        "infer the batch indices",
        "`__len__`",
        "does not have many workers",
        "than the logging interval",
        "across ranks is zero",  # a finished run that is started again has nothing left to do
        "in eval mode at the start of training",  # so is a backbone that only answers
    ):
        warnings.filterwarnings("ignore", message=f".*{pattern}")
    try:
        _cli(CLI, arguments, composed)
    except Exception as error:
        # What fails while Lightning cleans up after an error is not the cause.
        cause = error.__context__ if isinstance(error.__context__, RuntimeError) else None
        message = (cause and _message(cause)) or _message(error)
        if message is None or os.environ.get("LIT_DLM_TRACEBACK"):
            raise
        sys.stderr.write(f"lit-dlm: error: {printable(message)}\n")
        return 1
    finally:
        _held.close()
    return 0


def _cli(kind: type[CLI], arguments: Sequence[str], composed: Composed) -> CLI:
    # Lightning starts them as `sys.argv` says, where a caller in Python has other words.
    sys.argv = [sys.argv[0], *arguments]
    return kind(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        auto_configure_optimizers=False,
        parser_class=Parser,
        save_config_callback=RunConfigCallback,
        save_config_kwargs={
            "overwrite": True,
            "save_to_log_dir": False,
            "document": composed.document,
        },
        args=composed,  # type: ignore[arg-type]  # for parse_arguments
    )


def _message(error: Exception) -> str | None:
    """One line about an error that is not a fault of the program, else ``None``."""
    # Looked up, as importing wandb takes seconds and most runs have no such logger.
    if "wandb.errors" in sys.modules and isinstance(error, sys.modules["wandb.errors"].Error):
        reason = " ".join(str(error).split())
        return f"trainer.logger: {reason}; WANDB_MODE=offline keeps the run in its folder"
    if isinstance(error, ValueError | OSError | ImportError | MisconfigurationException):
        return explain(str(error)) + raised_in(error)
    line = str(error).strip().partition("\n")[0]
    # Its text goes on with sizes of the allocator; what to lower is in the notes of `Interruption`.
    if isinstance(error, torch.OutOfMemoryError):
        return "; ".join((line.partition(" GPU ")[0], *getattr(error, "__notes__", ())))
    # The rest has no class of its own, so its words are all there is to know it by.
    if isinstance(error, torch.distributed.DistError) or "/gloo/" in line:
        reason = line.rpartition("] ")[2][:200]
        return f"another process of this run has ended, so this one ends, too ({reason})"
    if twice := re.match(r"Found more than one stateful callback of type `(\w+)`", line):
        differ = "two of ModelCheckpoint must differ in monitor, mode, every_n_epochs or the like"
        return f"trainer.callbacks: a checkpoint cannot tell two of {twice[1]} apart; {differ}"
    if line.startswith("Early stopping conditioned"):
        return f"trainer.callbacks: {line}"
    if line.startswith("DataLoader worker"):
        return f"{line.rstrip('. ')}; the same command goes on (fit with --ckpt_path last)"
    return None
