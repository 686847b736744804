"""``lit-dlm runs``: the run folders below a folder, with what, when, state and the best figure."""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from lit_dlm.reports.tables import print_table
from lit_dlm.system.locks import in_use, state_file
from lit_dlm.system.terminal import PlainConsole

_BROKEN = (OSError, ValueError, TypeError, LookupError, AttributeError, yaml.YAMLError, csv.Error)
"""Errors of files that a killed run, or somebody else, left."""
_FIGURES: dict[str, Any] = {
    **{f"val/{name}": max for name in ("accuracy", "correct", "reward")},
    "val/loss": min,
    "rollout/reward": max,
    "train/loss": min,
    "train/nelbo": min,
}
"""Which value is best of metrics of ``fit``; the first that was logged is shown."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command with the arguments after its name; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="lit-dlm runs",
        description="Lists the runs of fit and predict below a folder: what they do, whether they "
        "are done, running or interrupted, their best figure, and when they began.",
    )
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
        return text_of(saved)
    except FileNotFoundError:
        return "-"
    except _BROKEN:
        return "unreadable"


def _what(saved: Path) -> str:
    # In C where it is there: OmegaConf takes a tenth of a second for each.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    model = yaml.load(saved.read_bytes(), Loader=loader)["model"]
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
        known = [(name, best) for name, best in _FIGURES.items() if name in curves][:1]
        return "".join(f"{n} {best(y for _, y in curves[n]):.4g}" for n, best in known) or "-"
    shares: dict[str, float] = {}
    for one in json.loads((saved.parent / "summary.json").read_bytes()):
        if one["accuracy"] is not None:
            shares[one["task"]] = max(one["accuracy"], shares.get(one["task"], 0.0))
    return ", ".join(f"{task} {100 * share:.1f} %" for task, share in shares.items()) or "-"


def _began(saved: Path) -> str:
    return f"{datetime.fromtimestamp(saved.stat().st_mtime):%Y-%m-%d %H:%M}"
