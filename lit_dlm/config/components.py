"""Objects from outside the package: what they may leave out, and what they lack."""

from __future__ import annotations

import hashlib
import inspect
import sys
import sysconfig
import traceback
from abc import ABCMeta
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))


class Component(metaclass=ABCMeta):  # noqa: B024  (abstract methods are those of its members)
    """Base of all classes that a class from outside the package may take the place of.

    A class counts as a policy, task, reward, ... if it has the abstract methods of that base and
    they take as many arguments; it need not derive from the base or have annotations. Type checkers
    accept only derived classes. :func:`checked_component` adds what else such a class leaves out.
    """

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        """Whether a class has the methods; ``FullWindow`` and the like require it to derive."""
        return (Component in cls.__bases__ and difference(other, cls) is None) or NotImplemented


def raised_in(error: BaseException) -> str:
    """Returns `` (FILE, line N)`` if an error comes from a class outside the package, else nothing.

    Of the lines that it passed, those of libraries do not count: the class handed them its values.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    package = str(Path(__file__).parents[1])
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith(package):
            break
        is_library = frame.filename.startswith((*_LIBRARIES, "<")) or "-packages" in frame.filename
        if not is_library:
            return f" ({type(error).__name__} in {frame.filename}, line {frame.lineno})"
    return ""


def source_digests(components: Iterable[object]) -> dict[str, str]:
    """Digests of the files outside the package that define the objects' classes, by class."""
    found = {}
    for kind in map(type, components):
        path = getattr(sys.modules.get(kind.__module__), "__file__", None)
        if path and kind.__module__.split(".")[0] != __name__.split(".")[0]:
            sha = hashlib.sha256(Path(path).read_bytes()).hexdigest()
            found[f"{kind.__module__}.{kind.__qualname__}"] = sha[:16]
    return found


def difference(kind: type, base: type) -> str | None:
    """Says how a class fails to implement a base's abstract methods; ``None`` if it has them."""
    names = sorted(getattr(base, "__abstractmethods__", ()))
    asked = {name: getattr(kind, name, None) for name in names}
    lacks = [
        f"'{name}'"
        for name, method in asked.items()
        if not callable(method) or getattr(method, "__isabstractmethod__", False)
    ]
    if lacks:
        told = f"method{'s' * (len(lacks) > 1)} {', '.join(lacks)}"
        return f"{kind.__name__} has no {told}, which {base.__name__} asks for"
    for name, method in asked.items():
        assert callable(method)
        wanted = inspect.signature(getattr(base, name)).parameters.values()
        by_name = {one.name: None for one in wanted if one.kind is one.KEYWORD_ONLY}
        is_method = inspect.isfunction(inspect.getattr_static(kind, name))
        try:
            if is_method:
                given = [None] * (len(wanted) - len(by_name))
                inspect.signature(method).bind(*given, **by_name)
        except TypeError:
            return (
                f"{kind.__name__}.{name} takes ({', '.join(inspect.signature(method).parameters)}) "
                f"but {base.__name__} asks for ({', '.join(one.name for one in wanted)})"
            )
    return None


def checked_component(given: T, base: type, *, option: str) -> T:
    """Returns the object; adds a base's defaults for members that its class leaves out.

    The base's abstract methods are required, and so are attributes without a value. Errors call the
    object ``option``.
    """
    if told := difference(type(given), base):
        raise ValueError(f"{option}: {told}")
    members = {**dict.fromkeys(inspect.get_annotations(base)), **vars(base)}
    for name in members:
        # Properties are not evaluated, since their values may be read from disk.
        if name.startswith("_") or inspect.getattr_static(given, name, members) is not members:
            continue
        if name not in vars(base):
            raise ValueError(
                f"{option}: {type(given).__name__} has no attribute '{name}', which "
                f"{base.__name__} asks for"
            )
        setattr(type(given), name, members[name])
    return given
