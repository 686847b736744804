"""``lit-dlm doctor``: what this machine offers (the sandbox is tried), and what follows from it."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from lit_dlm.grading import SandboxError, cgroups
from lit_dlm.grading.sandbox import METHODS, probe
from lit_dlm.system.extras import pip_install, required

_GB = 10**9
_EXTRAS = {
    "code": "MBPP+ cannot be graded",
    "eval": "'lit-dlm eval' and the IFEval task of lm-eval do not run",
    "serve": "'lit-dlm serve' does not run",
    "pictures": "the embedded picture model cannot be trained again",
    "quantized": "no weights of 4 bits and no AdamW of 8 bits",
    "log": "metrics go to CSV files alone, not to TensorBoard or Weights & Biases",
    "docs": "the documentation site cannot be built",
    "dev": "tests and checks do not run",
}

Finding = tuple[Literal["ok", "note", "bad"], str, str, str]
"""A line of the report: mark, subject, state, and what follows from it."""


def main(arguments: Sequence[str]) -> int:
    """Prints the findings; returns 1 if something that every run needs is missing or too old."""
    argparse.ArgumentParser(
        prog="lit-dlm doctor", description="Reports what this machine provides."
    ).parse_args(arguments)
    status = 0
    for mark, subject, state, consequence in chain(_versions(), _gpus(), _sandbox(), _space()):
        follows = f": {consequence}" if consequence else ""
        print(f"{mark:5}{subject:10}{state}{follows}", flush=True)  # noqa: T201
        status |= mark == "bad"
    return status


def _versions() -> Iterator[Finding]:
    python = f"Python {platform.python_version()}"
    try:
        needed = {extra: required(extra) for extra in ("", *_EXTRAS)}
    except metadata.PackageNotFoundError:
        yield "note", "versions", f"{python}; lit-dlm is not installed", "not compared"
        return
    missing = {extra: [one for one in of if not _is_met(one)] for extra, of in needed.items()}
    torch = metadata.version("torch")
    state = f"lit-dlm {metadata.version('lit-dlm')}, {python}, torch {torch}"
    wanted = missing[""]
    yield "bad" if wanted else "ok", "versions", state, pip_install(wanted) if wanted else ""
    for extra, consequence in _EXTRAS.items():
        if lacking := missing[extra]:
            how = f"{consequence}; {pip_install(lacking)}"
            yield "note", "extra", f"{extra} lacks {', '.join(map(str, lacking))}", how
        else:
            yield "ok", "extra", f"{extra} is installed", ""


def _is_met(requirement: Requirement) -> bool:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return False
    # Builds of torch carry a local version, and nightly ones count as pre-releases.
    return requirement.specifier.contains(version, prereleases=True)


def _gpus() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        yield "note", "GPU", "none", "the embedded models run, those of 7B and more are too slow"
        return
    if not any(map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))):
        yield "note", "compiler", "none", "long block models train with kernels that need gcc"
    for number in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(number)
        consequence = ""
        if device.major < 8:
            consequence = "computes no bfloat16: set trainer.precision to 32-true"
        elif device.total_memory < 20 * _GB:
            consequence = "too small for the 16 GB of an 8B model and its logits"
        state = f"{device.name}, {device.total_memory / _GB:.0f} GB"
        yield "note" if consequence else "ok", "GPU", state, consequence


def _sandbox() -> Iterator[Finding]:
    # Tried and not looked up: kernels and containers forbid each part of a sandbox separately.
    works = set()
    for method in METHODS:
        try:
            probe(method)
        except SandboxError as error:
            yield "note", "sandbox", f"{method} does not work ({error})", ""
        else:
            works.add(method)
            yield "ok", "sandbox", f"{method} works", ""
    if works and cgroups.parent_folder() is None:
        consequence = "limits of address space hold alone, see SECURITY.md"
        yield "note", "sandbox", "no memory cgroup can be made", consequence
    if not works:
        refused = "tasks that run model-written code are refused, all others work"
        yield "note", "sandbox", "none", refused
    elif works.isdisjoint(("bubblewrap", "namespaces")):
        needed = "RL on code needs require_isolation: landlock, see SECURITY.md"
        yield "note", "sandbox", "no namespaces", needed


def _space() -> Iterator[Finding]:
    from huggingface_hub import constants

    for name, folder in (("here", Path.cwd()), ("hub cache", Path(constants.HF_HUB_CACHE))):
        # A cache folder is made at first use, so its disk is that of a folder above.
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free, consequence = shutil.disk_usage(there).free, ""
        if not os.access(there, os.W_OK):
            consequence = "not writable: set run_dir, or HF_HOME for the cache"
        elif free < 40 * _GB:
            consequence = "an 8B model takes 16 GB, and as much again for each export"
        state = f"{free / _GB:.0f} GB free, {name} ({folder})"
        yield "note" if consequence else "ok", "disk", state, consequence
