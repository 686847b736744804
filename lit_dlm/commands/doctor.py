"""``lit-dlm doctor``: what this machine gives, and what follows from it.

Nothing is changed and nothing is fetched. The sandbox is tried, not guessed at.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Literal, get_args

from packaging.requirements import Requirement

from lit_dlm.grading import SandboxError
from lit_dlm.grading.launch import IsolationMethod, probe

_GB = 10**9
_EXTRAS = {
    "code": "MBPP+ cannot be graded",
    "log": "metrics go to CSV files alone, not to TensorBoard or Weights & Biases",
}


Finding = tuple[Literal["ok", "note", "bad"], str, str, str]
"""A line of the report: mark, subject, state, and what follows from it."""


def main(arguments: Sequence[str]) -> int:
    """Prints the findings; returns 1 if something that every run needs is missing or too old."""
    parser = argparse.ArgumentParser(
        prog="lit-dlm doctor", description="Says what this machine gives, and what follows from it."
    )
    parser.parse_args(arguments)
    status = 0
    for mark, subject, state, consequence in chain(_versions(), _gpus(), _sandbox(), _space()):
        follows = f": {consequence}" if consequence else ""
        sys.stdout.write(f"{mark:5}{subject:10}{state}{follows}\n")
        sys.stdout.flush()
        status |= mark == "bad"
    return status


def _versions() -> Iterator[Finding]:
    python = f"Python {platform.python_version()}"
    try:
        requirements = [Requirement(line) for line in metadata.requires("lit-dlm") or []]
    except metadata.PackageNotFoundError:
        yield "note", "versions", f"{python}; lit-dlm is not installed", "not compared"
        return
    missing: dict[str, list[str]] = {}
    for requirement in requirements:
        for extra in ("", *_EXTRAS):
            marker = requirement.marker
            belongs = marker.evaluate({"extra": extra}) if marker else not extra
            if belongs and not _is_met(requirement):
                missing.setdefault(extra, []).append(f"{requirement.name}{requirement.specifier}")
    torch = metadata.version("torch")
    state = f"lit-dlm {metadata.version('lit-dlm')}, {python}, torch {torch}"
    if "" in missing:
        wanted = "pip install --upgrade " + " ".join(f"'{name}'" for name in missing.pop(""))
        yield "bad", "versions", state, wanted
    else:
        yield "ok", "versions", state, ""
    for extra, consequence in _EXTRAS.items():
        if extra in missing:
            how = f"{consequence}; pip install 'lit-dlm[{extra}]'"
            yield "note", "extra", f"{extra} lacks {', '.join(missing[extra])}", how
        else:
            yield "ok", "extra", f"{extra} is installed", ""


def _is_met(requirement: Requirement) -> bool:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(version, prereleases=True)


def _gpus() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        yield "note", "GPU", "none", "the embedded models run, those of 7B and more are too slow"
        return
    for number in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(number)
        state = f"{device.name}, {device.total_memory / _GB:.0f} GB"
        if device.major < 8:
            yield "note", "GPU", state, "computes no bfloat16: set trainer.precision to 32-true"
        elif device.total_memory < 20 * _GB:
            yield "note", "GPU", state, "too small for the 16 GB of an 8B model and its logits"
        else:
            yield "ok", "GPU", state, ""


def _sandbox() -> Iterator[Finding]:
    methods: tuple[IsolationMethod, ...] = get_args(IsolationMethod)
    works = {}
    for method in methods:
        try:
            probe(method)
        except SandboxError as error:
            works[method] = False
            yield "note", "sandbox", f"{method} does not work ({error})", ""
        else:
            works[method] = True
            yield "ok", "sandbox", f"{method} works", ""
    if not any(works.values()):
        refused = "tasks that run model-written code are refused, all others work"
        yield "note", "sandbox", "none", refused
    elif not (works["bubblewrap"] or works["namespaces"]):
        needed = "RL on code needs require_isolation: landlock, see SECURITY.md"
        yield "note", "sandbox", "no namespaces", needed


def _space() -> Iterator[Finding]:
    from huggingface_hub import constants

    for name, folder in (("here", Path.cwd()), ("hub cache", Path(constants.HF_HUB_CACHE))):
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free = shutil.disk_usage(there).free
        state = f"{free / _GB:.0f} GB free, {name} ({folder})"
        if not os.access(there, os.W_OK):
            yield "note", "disk", state, "not writable: set run_dir, or HF_HOME for the cache"
        elif free < 40 * _GB:
            needed = "an 8B model takes 16 GB, and as much again for each export"
            yield "note", "disk", state, needed
        else:
            yield "ok", "disk", state, ""
