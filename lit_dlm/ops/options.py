"""Checks of options, in one wording: what was expected of which, and what came."""

from __future__ import annotations


def at_least(least: float, *, of: str = "", **options: float | None) -> None:
    """Refuses options below a bound; ``None`` passes."""
    for name, value in options.items():
        if value is not None and not value >= least:
            wanted = f"at least {least}" if least else "0 or more"
            raise ValueError(f"{of}{name}: expected {wanted}, got {value}")


def within(bounds: str, *, of: str = "", **options: float | None) -> None:
    """Refuses options outside of an interval; ``None`` passes.

    Args:
        bounds: such as ``[0, 1)``, without its upper end.
    """
    low, high = map(float, bounds[1:-1].split(","))
    ends = [end for end, bracket in ((low, bounds[0]), (high, bounds[-1])) if bracket in "()"]
    for name, value in options.items():
        if value is not None and (not low <= value <= high or value in ends):
            raise ValueError(f"{of}{name}: expected a number in {bounds}, got {value}")


def one_of(*choices: object, of: str = "", **options: object) -> None:
    """Refuses options that are none of some values."""
    *others, last = map(repr, choices)
    wanted = f"{', '.join(others)} or {last}" if others else last
    for name, value in options.items():
        if value not in choices:
            raise ValueError(f"{of}{name}: expected {wanted}, got {value!r}")
