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
    found = ((Requirement(line.partition(";")[0]), Requirement(line).marker) for line in lines)
    return [one for one, when in found if (when.evaluate({"extra": extra}) if when else not extra)]


def pip_install(requirements: Iterable[Requirement]) -> str:
    """Returns the command that installs the packages."""
    return " ".join(["pip install", *(f"'{one}'" for one in requirements)])


def install_hint(told: str) -> str:
    """Returns the command for optional packages that an error names, as the end of its line."""
    try:
        optional = [Requirement(line) for line in metadata.requires("lit-dlm") or []]
    except metadata.PackageNotFoundError:
        return ""
    words = {word.replace("_", "-") for word in re.findall(r"[\w-]+", told)}
    absent = {one.name: one for one in optional if one.marker and one.name in words}
    wanted = [one for name, one in absent.items() if find_spec(name.replace("-", "_")) is None]
    for one in wanted:
        one.marker = None  # which extra needs it
    return f"; {pip_install(wanted)}" if wanted else ""
