"""What the extras of this package require; it is not on PyPI, so ``pip`` needs their names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import metadata
from importlib.util import find_spec

from packaging.requirements import Requirement


def required(extra: str = "") -> list[Requirement]:
    """Returns what an extra requires, by the metadata of the package; by default its own needs.

    Raises ``PackageNotFoundError`` in a checkout that is not installed.
    """
    lines = metadata.requires("lit-dlm") or []
    parsed = ((Requirement(line.partition(";")[0]), Requirement(line).marker) for line in lines)
    return [one for one, when in parsed if (when.evaluate({"extra": extra}) if when else not extra)]


def pip_install(requirements: Iterable[Requirement]) -> str:
    """Returns the command that installs the packages."""
    return " ".join(["pip install", *(f"'{one}'" for one in requirements)])


def install_hint(message: str) -> str:
    """Returns the command for optional packages that an error names, if they are absent."""
    try:
        lines = metadata.requires("lit-dlm") or []
    except metadata.PackageNotFoundError:
        return ""
    optional = [Requirement(line.partition(";")[0]) for line in lines if "extra ==" in line]
    # Packages are imported with underscores and installed with hyphens.
    words = {word.replace("_", "-") for word in re.findall(r"[\w-]+", message)}
    named = [one for one in optional if one.name in words and f"'{one}'" not in message]
    absent = [one for one in named if find_spec(one.name.replace("-", "_")) is None]
    return f"; {pip_install(absent)}" if absent else ""
