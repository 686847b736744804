"""What the extras of this package require; it is not on PyPI, so ``pip`` needs their names."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata

from packaging.requirements import Requirement


def required(extra: str = "") -> list[Requirement]:
    """Returns what an extra requires, by the metadata of the package; by default its own needs.

    Raises ``PackageNotFoundError`` in a checkout that is not installed.
    """
    found = [Requirement(line) for line in metadata.requires("lit-dlm") or []]
    fitting = [
        one for one in found if (one.marker.evaluate({"extra": extra}) if one.marker else not extra)
    ]
    for one in fitting:
        one.marker = None  # it holds
    return fitting


def pip_install(requirements: Iterable[Requirement]) -> str:
    """Returns the command that installs the packages."""
    return " ".join(["pip install", *(f"'{one}'" for one in requirements)])
