"""Checks of options with uniform errors: which option, what was expected, and what it got."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, NoReturn, TypeVar, get_type_hints

T = TypeVar("T")
_MOST_LISTED = 20


def refuse(option: str, expected: object, got: object, hint: str = "") -> NoReturn:
    """Raises the error of a user's mistake: one line with its place, and perhaps a way out."""
    raise ValueError(f"{option}: expected {expected}, got {got}{hint}")


def at_least(least: float, *, of: str = "", **options: float | None) -> None:
    """Refuses options below a bound; ``None`` passes."""
    for name, value in options.items():
        # Written so that NaN, which is not less than anything, is refused, too.
        if value is not None and not value >= least:
            refuse(f"{of}{name}", f"at least {least}" if least else "0 or more", value)


def within(bounds: str, *, of: str = "", **options: float | None) -> None:
    """Refuses options outside an interval such as ``[0, 1)``, without its end; ``None`` passes."""
    low, high = map(float, bounds[1:-1].split(","))
    # Bounds are written as in mathematics, so that messages show them as they are meant.
    ends = [end for end, bracket in ((low, bounds[0]), (high, bounds[-1])) if bracket in "()"]
    for name, value in options.items():
        if value is not None and (not low <= value <= high or value in ends):
            refuse(f"{of}{name}", f"a number in {bounds}", value)


def one_of(*choices: object, of: str = "", **options: object) -> None:
    """Refuses options that are not among the choices."""
    names = [*map(repr, choices)] or ["nothing"]
    expected = " or ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
    for name, value in options.items():
        if value not in choices:
            hint = _similar(str(value), map(str, choices))
            refuse(f"{of}{name}", expected, repr(value), hint)


def refuse_first(*mistakes: tuple[object, str]) -> None:
    """Raises the message of the first mistake that was made, of pairs of both."""
    for is_made, message in mistakes:
        if is_made:
            raise ValueError(message)


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns a hint such as ``; did you mean 'threshold'?``, else all known names if few."""
    names = sorted(set(known))
    listed = f"; known: {', '.join(names)}" if 0 < len(names) <= _MOST_LISTED else ""
    return _similar(name, names) or listed


def _similar(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


def of_kind(value: object, kind: type[T], *, option: str) -> T:
    """Returns the value; refuses one of another class."""
    if not isinstance(value, kind):
        refuse(option, kind.__name__, type(value).__name__)
    return value


def of_declared_kinds(options: Any) -> None:
    """Refuses fields of a dataclass with values of other types than declared, as in files."""
    from huggingface_hub.dataclasses import type_validator  # it takes time to import

    for name, kind in get_type_hints(type(options)).items():
        value = getattr(options, name)
        try:
            # JSON has no floats that are whole numbers.
            type_validator(name, value, float | int if kind is float else kind)
        except TypeError:
            expected = kind.__name__ if isinstance(kind, type) else kind
            refuse(f"{type(options).__name__}.{name}", expected, repr(value))
