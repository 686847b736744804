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
from dataclasses import dataclass
from importlib import metadata
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


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report."""

    mark: Literal["ok", "note", "bad"]
    subject: str
    state: str
    consequence: str = ""


def main(arguments: Sequence[str]) -> int:
    """Prints the findings.

    Args:
        arguments: none but ``--help``.

    Returns:
        The exit status: 1 if something that every run needs is missing or too old.
    """
    parser = argparse.ArgumentParser(
        prog="lit-dlm doctor", description="Says what this machine gives, and what follows from it."
    )
    parser.parse_args(arguments)
    status = 0
    for finding in _findings():
        follows = f": {finding.consequence}" if finding.consequence else ""
        sys.stdout.write(f"{finding.mark:5}{finding.subject:10}{finding.state}{follows}\n")
        sys.stdout.flush()
        status |= finding.mark == "bad"
    return status


def _findings() -> Iterator[Finding]:
    yield from _versions()
    yield from _gpus()
    yield from _sandbox()
    yield from _space()


def _versions() -> Iterator[Finding]:
    python = f"Python {platform.python_version()}"
    try:
        requirements = [Requirement(line) for line in metadata.requires("lit-dlm") or []]
    except metadata.PackageNotFoundError:
        state = f"{python}; lit-dlm is not installed"
        yield Finding(mark="note", subject="versions", state=state, consequence="not compared")
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
        yield Finding(mark="bad", subject="versions", state=state, consequence=wanted)
    else:
        yield Finding(mark="ok", subject="versions", state=state)
    for extra, consequence in _EXTRAS.items():
        if extra in missing:
            state = f"{extra} lacks {', '.join(missing[extra])}"
            how = f"{consequence}; pip install 'lit-dlm[{extra}]'"
            yield Finding(mark="note", subject="extra", state=state, consequence=how)
        else:
            yield Finding(mark="ok", subject="extra", state=f"{extra} is installed")


def _is_met(requirement: Requirement) -> bool:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(version, prereleases=True)


def _gpus() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        consequence = "the embedded models run, those of 7B and more are too slow"
        yield Finding(mark="note", subject="GPU", state="none", consequence=consequence)
        return
    for number in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(number)
        state = f"{device.name}, {device.total_memory / _GB:.0f} GB"
        if device.major < 8:
            consequence = "computes no bfloat16: set trainer.precision to 32-true"
            yield Finding(mark="note", subject="GPU", state=state, consequence=consequence)
        elif device.total_memory < 20 * _GB:
            consequence = "too small for the 16 GB of an 8B model and its logits"
            yield Finding(mark="note", subject="GPU", state=state, consequence=consequence)
        else:
            yield Finding(mark="ok", subject="GPU", state=state)


def _sandbox() -> Iterator[Finding]:
    methods: tuple[IsolationMethod, ...] = get_args(IsolationMethod)
    works = {}
    for method in methods:
        try:
            probe(method)
        except SandboxError as error:
            works[method] = False
            state = f"{method} does not work ({error})"
            yield Finding(mark="note", subject="sandbox", state=state)
        else:
            works[method] = True
            yield Finding(mark="ok", subject="sandbox", state=f"{method} works")
    if not any(works.values()):
        consequence = "tasks that run model-written code are refused, all others work"
        yield Finding(mark="note", subject="sandbox", state="none", consequence=consequence)
    elif not (works["bubblewrap"] or works["namespaces"]):
        consequence = "RL on code needs require_isolation: landlock, see SECURITY.md"
        yield Finding(
            mark="note", subject="sandbox", state="no namespaces", consequence=consequence
        )


def _space() -> Iterator[Finding]:
    from huggingface_hub import constants

    for name, folder in (("here", Path.cwd()), ("hub cache", Path(constants.HF_HUB_CACHE))):
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free = shutil.disk_usage(there).free
        state = f"{free / _GB:.0f} GB free, {name} ({folder})"
        if not os.access(there, os.W_OK):
            consequence = "not writable: set run_dir, or HF_HOME for the cache"
            yield Finding(mark="note", subject="disk", state=state, consequence=consequence)
        elif free < 40 * _GB:
            consequence = "an 8B model takes 16 GB, and as much again for each export"
            yield Finding(mark="note", subject="disk", state=state, consequence=consequence)
        else:
            yield Finding(mark="ok", subject="disk", state=state)
