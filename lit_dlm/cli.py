"""The command line: one table of commands, each imported when it is called."""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module

from lit_dlm import __version__
from lit_dlm.config.components import raised_in
from lit_dlm.system.extras import install_hint
from lit_dlm.system.terminal import printable, show_plainly

# Read by torch: no checkpoint is unpickled, not even parts of sharded ones.
os.environ.setdefault("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

TRAINER = "lit_dlm.commands.run"

_EVALUATE = "tasks of lm-eval with our decoders; answers for EvalPlus"
_EXPORT = "write a model for transformers, peft and the hub"
_LISTS = "list the experiments that are shipped; runs of a folder"
COMMANDS = {
    "fit": (TRAINER, "train: distil, fine-tune, or reinforcement learning"),
    "validate": (TRAINER, "one epoch of a configuration's validation"),
    "predict": (TRAINER, "decode the prompts of tasks: benchmarks and trajectories"),
    "generate": ("lit_dlm.commands.generation", "decode prompts of the command line or stdin"),
    "chat": ("lit_dlm.commands.chat", "talk with a model and watch it unmask"),
    "serve": ("lit_dlm.commands.serve", "a model behind OpenAI's interface, for many at once"),
    "eval": ("lit_dlm.commands.evaluation", _EVALUATE),
    "evalplus": ("lit_dlm.commands.evalplus", _EVALUATE),
    "export": ("lit_dlm.commands.export", _EXPORT),
    "merge": ("lit_dlm.commands.export:merge", _EXPORT),
    "push": ("lit_dlm.commands.push", _EXPORT),
    "new": ("lit_dlm.commands.scaffold", "begin a policy, task, reward or method of your own"),
    "recipes": ("lit_dlm.commands.recipes", _LISTS),
    "runs": ("lit_dlm.reports.runs", _LISTS),
    "plan": ("lit_dlm.commands.plan", "memory and disk that a configuration needs"),
    "download": ("lit_dlm.commands.download", "fetch models and data that a configuration names"),
    "report": ("lit_dlm.reports.command", "tables, plots and pages of benchmark runs"),
    "compare": ("lit_dlm.reports.compare_command", "paired significance tests of two runs"),
    "view": ("lit_dlm.reports.viewer_command", "decodes step by step, as a page or as pictures"),
    "traj": ("lit_dlm.commands.traj", "inspect, replay, verify and convert trajectories"),
    "doctor": ("lit_dlm.commands.doctor", "what this machine has: sandbox, GPUs, extras, disk"),
    "profile": ("lit_dlm.commands.profile", "speed and quality of policies, budgets and caches"),
}
"""Module and purpose of every command; the module's ``main(arguments)``, or the function named
after a colon, returns the exit status."""

HELP = """usage: lit-dlm COMMAND [options]

Post-train and decode masked diffusion language models.

{commands}

'lit-dlm COMMAND --help' explains one of them, '--version' names this one.
"""

TRAINER_HELP = """usage: lit-dlm {command} --config FILE [--config FILE ...] [options]

{purpose}.

  --config FILE          an experiment or a part of one; later files and options win
  --run_dir FOLDER       receives all results (default: that of the configuration)
  --ckpt_path PATH       checkpoint to load; 'last' goes on from the newest, if there is one
  --trainer.max_steps N  any setting of the trainer, likewise --trainer.devices, ...
  --model.X V            any setting of the model
  --data.X V             any setting of the data
  --print_config         print the resolved configuration and stop
  --model.help CLASS     the settings of a model class; likewise --data.help CLASS
  --help_all             every option
"""


def main(args: list[str] | None = None) -> None:
    """Runs the command line, by default with the arguments of the process."""
    name, *rest = (sys.argv[1:] if args is None else args) or ["--help"]
    if name in ("--help", "-h"):
        names: dict[str, list[str]] = {}
        for command, (_, purpose) in COMMANDS.items():
            names.setdefault(purpose, []).append(command)
        lines = [f"  {', '.join(one):19}  {purpose}" for purpose, one in names.items()]
        sys.stdout.write(HELP.format(commands="\n".join(lines)))
    elif name == "--version":
        sys.stdout.write(f"lit-dlm {__version__}\n")
    elif name not in COMMANDS:
        message = f"unknown command '{name}'; known: {', '.join(COMMANDS)}"
        if name == "test":
            message = "test: nothing to run; 'validate' scores a model, 'predict' runs benchmarks"
        sys.stderr.write(f"lit-dlm: error: {message}\n")
        raise SystemExit(2)
    elif COMMANDS[name][0] == TRAINER and rest in (["--help"], ["-h"]):
        # The parser itself takes seconds to import.
        purpose = COMMANDS[name][1]
        purpose = purpose[0].upper() + purpose[1:]
        sys.stdout.write(TRAINER_HELP.format(command=name, purpose=purpose))
    elif status := _run(name, rest):
        raise SystemExit(status)


def _run(name: str, rest: list[str]) -> int:
    """Runs a command and returns its exit status; reports what it refused in one line."""
    module = COMMANDS[name][0]
    if module == TRAINER:
        rest = [name, *("--help" if option == "--help_all" else option for option in rest)]
    # Before any library is imported: some have handlers of their own.
    show_plainly()
    # Configurations may name the user's own classes, from files in the working folder.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        path, _, function = module.partition(":")
        status = getattr(import_module(path), function or "main")(rest)
        # Here, so that a reader that has gone is noticed inside of the `try`.
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output, such as `head`, has seen enough
        # Python flushes the output once more at its end, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:  # before a run handles the signal itself, and in short commands
        return 128 + signal.SIGINT
    except (ValueError, OSError, ModuleNotFoundError, SyntaxError) as error:
        if os.environ.get("LIT_DLM_TRACEBACK"):
            raise
        message = " ".join(str(error).split())
        message += install_hint(message) + raised_in(error)
        sys.stderr.write(f"lit-dlm: error: {printable(message)}\n")
        return 1
    return int(status or 0)
