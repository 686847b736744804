"""``lit-dlm runs``: the runs below a folder, with what, state, best figure and when they began."""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

import yaml

from lit_dlm.reports.tables import print_table
from lit_dlm.system.locks import in_use, state_file
from lit_dlm.system.terminal import PlainConsole

_BROKEN = (OSError, ValueError, TypeError, LookupError, AttributeError, yaml.YAMLError, csv.Error)
"""Errors of files that a killed run, or somebody else, left."""
_FIGURES = ("val/accuracy", "val/reward", "val/loss", "rollout/reward", "train/loss", "train/nelbo")
"""Metrics of ``fit``, of which the first that was logged is shown."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command with the arguments after its name; returns the exit status."""
    description = "Lists runs of fit and predict: what, state, best figure and when they began."
    parser = argparse.ArgumentParser(prog="lit-dlm runs", description=description)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs"), help="default: runs")
    folder = parser.parse_args(arguments).folder
    if not folder.is_dir():
        raise ValueError(f"{folder}: expected a folder that holds runs, found none")
    found = [path for name in ("fit", "predict") for path in folder.rglob(f"{name}.yaml")]
    texts = {"what": _what, "state": _state, "best": _best, "began": _began}
    rows = [
        (str(path.parent.relative_to(folder)), *(_told(one, path) for one in texts.values()))
        for path in sorted(found, key=lambda path: path.stat().st_mtime)
    ]
    print_table(PlainConsole(), f"Runs in {folder}", ("run", *texts), rows)
    return 0


def _told(text_of: Callable[[Path], str], saved: Path) -> str:
    try:
        return text_of(saved) or "-"
    except FileNotFoundError:
        return "-"
    except _BROKEN:
        return "unreadable"


def _what(saved: Path) -> str:
    model = yaml.safe_load(saved.read_bytes())["model"]
    kind = model["class_path"].rpartition(".")[2].removesuffix("Module")
    return f"{saved.stem} {kind}, {model['init_args']['tokenizer']}"


def _state(saved: Path) -> str:
    if (state := state_file(saved).read_text()) == "done":
        return state
    # A run in a part of its run folder, such as further steps of a method, locks the whole.
    locks = (folder / f".{saved.stem}.lock" for folder in (saved.parent, saved.parent.parent))
    return "running" if any(map(in_use, locks)) else "interrupted"


def _best(saved: Path) -> str:
    if saved.stem == "fit":
        from lit_dlm.reports.plots import read_curves  # imports matplotlib, in a second

        curves = read_curves(saved.parent / "logs")
        name = next((name for name in _FIGURES if name in curves), "")
        best = max if name.endswith(("accuracy", "reward")) else min
        return f"{name} {best(value for _, value in curves[name]):.4g}" if name else ""
    shares: dict[str, float] = {}
    for one in json.loads((saved.parent / "summary.json").read_bytes()):
        if one["accuracy"] is not None:
            shares[one["task"]] = max(one["accuracy"], shares.get(one["task"], 0.0))
    return ", ".join(f"{task} {100 * share:.1f} %" for task, share in shares.items())


def _began(saved: Path) -> str:
    return f"{datetime.fromtimestamp(saved.stat().st_mtime):%Y-%m-%d %H:%M}"
