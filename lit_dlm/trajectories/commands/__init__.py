"""``lit-dlm traj``: look at trajectories, verify, convert and keep them.

Every command has a module with ``add_parser(subparsers)``; the parser's ``run`` default takes the
parsed options and returns the exit status: 0, 1 for a failed verification or a difference, 2 for
bad usage or unreadable input.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from lit_dlm.trajectories.commands import convert, diff, inspect, keep, replay, verify


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    top = argparse.ArgumentParser(
        prog="lit-dlm traj",
        description="Look at stored trajectories, verify them, convert them, and keep them.",
        epilog="SHARDS is a folder of a set, or paths of its .tar files.",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (inspect, replay, verify, diff, keep, convert):
        module.add_parser(commands)
    return top


def main(arguments: Sequence[str]) -> int:
    """Runs one command.

    Args:
        arguments: what follows ``lit-dlm traj``.

    Returns:
        The exit status.
    """
    try:
        options = parser().parse_args(list(arguments))
    except SystemExit as stop:  # --help, or bad usage that argparse has explained
        return int(stop.code or 0)
    try:
        return int(options.run(options))
    except (ValueError, OSError, RuntimeError) as error:
        if os.environ.get("LIT_DLM_TRACEBACK"):
            raise
        sys.stderr.write(f"lit-dlm traj {options.command}: error: {error}\n")
        return 2


__all__ = ["main", "parser"]
