"""Objects from outside of the package: what they may leave out, and what they lack."""

from __future__ import annotations

import inspect
from abc import ABCMeta
from typing import Any, TypeVar

T = TypeVar("T")


class Plug(metaclass=ABCMeta):  # noqa: B024  (abstract methods are those of its members)
    """Base of everything that a class from outside of the package may stand for.

    A class counts as a policy, task, reward, ... if it has the abstract methods of that base and
    they can be called with as many arguments; it need not derive from it, nor be annotated. Type
    checkers know only what derives. :func:`checked_plug` adds what else such a class leaves out.
    """

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        """Whether a class has the methods; members such as ``FullWindow`` ask for derivation."""
        return (Plug in cls.__bases__ and difference(other, cls) is None) or NotImplemented


def difference(kind: type, plug: type) -> str | None:
    """Says what a class lacks or has otherwise of a plug's abstract methods; ``None``: nothing."""
    names = sorted(getattr(plug, "__abstractmethods__", ()))
    asked = {name: getattr(kind, name, None) for name in names}
    lacks = [
        f"'{name}'"
        for name, method in asked.items()
        if not callable(method) or getattr(method, "__isabstractmethod__", False)
    ]
    if lacks:
        told = f"method{'s' * (len(lacks) > 1)} {', '.join(lacks)}"
        return f"{kind.__name__} has no {told}, which {plug.__name__} asks for"
    for name, method in asked.items():
        assert callable(method)
        wanted = inspect.signature(getattr(plug, name)).parameters.values()
        by_name = {one.name: None for one in wanted if one.kind is one.KEYWORD_ONLY}
        is_method = inspect.isfunction(inspect.getattr_static(kind, name))
        try:
            if is_method:
                given = [None] * (len(wanted) - len(by_name))
                inspect.signature(method).bind(*given, **by_name)
        except TypeError:
            return (
                f"{kind.__name__}.{name} takes ({', '.join(inspect.signature(method).parameters)}) "
                f"but {plug.__name__} asks for ({', '.join(one.name for one in wanted)})"
            )
    return None


def checked_plug(given: T, plug: type, *, option: str) -> T:
    """Gives an object the base's own defaults for members that its class leaves out.

    Args:
        given: of any class; that class gets the members.
        plug: its abstract methods are required, and so are attributes without a value.
        option: what to call the object in errors.

    Returns:
        The object itself.
    """
    if told := difference(type(given), plug):
        raise ValueError(f"{option}: {told}")
    members = {**dict.fromkeys(inspect.get_annotations(plug)), **vars(plug)}
    for name in members:
        # A property is not asked for its value, which may be read from disk.
        if name.startswith("_") or inspect.getattr_static(given, name, members) is not members:
            continue
        if name not in vars(plug):
            raise ValueError(
                f"{option}: {type(given).__name__} has no attribute '{name}', which "
                f"{plug.__name__} asks for"
            )
        setattr(type(given), name, members[name])
    return given
