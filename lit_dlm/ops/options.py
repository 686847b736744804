"""Checks of options with uniform errors: which option, what was expected, and what it got."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def at_least(least: float, *, of: str = "", **options: float | None) -> None:
    """Refuses options below a bound; ``None`` passes."""
    for name, value in options.items():
        if value is not None and not value >= least:
            wanted = f"at least {least}" if least else "0 or more"
            raise ValueError(f"{of}{name}: expected {wanted}, got {value}")


def within(bounds: str, *, of: str = "", **options: float | None) -> None:
    """Refuses options outside an interval such as ``[0, 1)``, without its end; ``None`` passes."""
    low, high = map(float, bounds[1:-1].split(","))
    ends = [end for end, bracket in ((low, bounds[0]), (high, bounds[-1])) if bracket in "()"]
    for name, value in options.items():
        if value is not None and (not low <= value <= high or value in ends):
            raise ValueError(f"{of}{name}: expected a number in {bounds}, got {value}")


def one_of(*choices: object, of: str = "", **options: object) -> None:
    """Refuses options that are not among the choices."""
    names = [*map(repr, choices)] or ["nothing"]
    wanted = " or ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
    for name, value in options.items():
        if value not in choices:
            raise ValueError(f"{of}{name}: expected {wanted}, got {value!r}")


def of_kind(value: object, kind: type[T], *, option: str) -> T:
    """Returns the value; refuses one of another class."""
    if not isinstance(value, kind):
        raise ValueError(f"{option}: expected {kind.__name__}, got {type(value).__name__}")
    return value
