"""Objects from outside of the package: what they may leave out, and what they lack."""

from __future__ import annotations

import inspect
from typing import TypeVar

T = TypeVar("T")


def completed(given: T, protocol: type, *, option: str) -> T:
    """Gives an object the protocol's own defaults for attributes that its class leaves out.

    Args:
        given: of any class; that class gets the attributes.
        protocol: methods are required, and so are attributes without a value.
        option: what to call the object in errors.

    Returns:
        The object itself.

    Raises:
        ValueError: names the first required member that the object lacks.
    """
    members = {**dict.fromkeys(inspect.get_annotations(protocol)), **vars(protocol)}
    for name in members:
        # A property is not asked for its value, which may be read from disk.
        if name.startswith("_") or inspect.getattr_static(given, name, members) is not members:
            continue
        if name not in vars(protocol) or inspect.isfunction(members[name]):
            raise ValueError(
                f"{option}: {type(given).__name__} has no member '{name}', which "
                f"{protocol.__name__} asks for"
            )
        setattr(type(given), name, members[name])
    return given
