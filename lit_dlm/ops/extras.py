"""What the extras of this package require; it is not on PyPI, so ``pip`` needs their names."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata

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
