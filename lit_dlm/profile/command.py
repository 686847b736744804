"""``lit-dlm profile``: decodes a grid of methods on one task and reports speed and quality.

The work is that of ``lit-dlm predict``; this command writes the grid's configuration before it and
the profile's table, file and picture after it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console

from lit_dlm.profile.grid import ADAPTIVE, CACHES, Grid, policy_files
from lit_dlm.profile.loggers import LOGGERS, check_installed, log_profile, make_logger
from lit_dlm.profile.points import profile_points, write_profile
from lit_dlm.reports.command import method_order
from lit_dlm.reports.results import write_atomically
from lit_dlm.reports.summary import summarise_folder

DEFAULT_STEPS: tuple[int | str, ...] = (5, 10, 20, 50)


def main(arguments: Sequence[str], *, predict: Callable[[list[str]], object]) -> int:
    """Runs the command.

    Args:
        arguments: what follows ``lit-dlm profile``; what this command does not know goes to
            ``predict``.
        predict: the command line itself, called with ``["predict", ...]``.

    Returns:
        The exit status, 0.

    Raises:
        ValueError: a file, cache or number of steps is wrong, or nothing was decoded.
    """
    options, rest = _parser().parse_known_args(list(arguments))
    check_installed(options.loggers)
    run_dir: Path = options.run_dir
    command = ["predict"]
    for config in options.config:
        command += ["--config", config]
    if options.policies:
        grid = Grid(
            policies=policy_files(options.policies), steps=options.steps, caches=options.caches
        )
        path = run_dir / "grid.yaml"
        write_atomically(path, yaml.safe_dump(grid.config(), sort_keys=False))
        command += ["--config", str(path)]
    elif options.caches or options.steps != list(DEFAULT_STEPS):
        raise ValueError(
            "profile: --steps and --caches apply to the files of --policies, which were not given; "
            "without them the methods of the configuration are profiled as they are"
        )
    predict([*command, "--run_dir", str(run_dir), *rest])
    if getattr(rank_zero_only, "rank", 0) == 0:  # set by the trainer
        _report(run_dir, options.loggers, project=options.project, offline=options.offline)
    return 0


def _report(run_dir: Path, loggers: Sequence[str], *, project: str, offline: bool) -> None:
    summaries = summarise_folder(run_dir / "results", method_order(run_dir))
    if not summaries:
        raise ValueError(f"{run_dir}: expected results in {run_dir / 'results'}, found none")
    points = profile_points(summaries)
    write_profile(points, run_dir)
    for name in loggers:
        log_profile(
            make_logger(name, run_dir, project=project, offline=offline),
            points,
            run_dir / "profile.png",
        )
    Console().print(f"Profile: {run_dir / 'profile.md'}, profile.csv, profile.png")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lit-dlm profile",
        description="Speed and quality of policies, budgets of steps and caches on one task. "
        "Further options go to 'lit-dlm predict'.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        action="append",
        required=True,
        help="experiment with a DecodeModule, a task and a ResultWriter; may be repeated",
    )
    parser.add_argument(
        "--policies",
        nargs="+",
        default=[],
        metavar="[NAME=]FILE",
        help="decode files to cross with --steps and --caches (default: the methods of the config)",
    )
    parser.add_argument(
        "--steps",
        nargs="+",
        type=_steps,
        default=list(DEFAULT_STEPS),
        help=f"budgets of forwards, or '{ADAPTIVE}' for the quota of the decode file "
        "(default: 5 10 20 50)",
    )
    parser.add_argument(
        "--caches", nargs="+", default=[], choices=list(CACHES), help="caches to cross with"
    )
    parser.add_argument(
        "--loggers", nargs="+", default=[], choices=LOGGERS, help="where to log the profile as well"
    )
    parser.add_argument("--project", default="lit-dlm", help="W&B project")
    parser.add_argument("--offline", action="store_true", help="W&B without a network")
    parser.add_argument("--run_dir", type=Path, default=Path("runs/profile"), help="run folder")
    return parser


def _steps(text: str) -> int | str:
    if text == ADAPTIVE:
        return text
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"expected a number or '{ADAPTIVE}', got {text!r}"
        ) from error
