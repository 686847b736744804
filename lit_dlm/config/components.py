"""Objects from outside the package: what they may leave out, and what they lack."""

from __future__ import annotations

import hashlib
import inspect
import sys
import sysconfig
import traceback
from abc import ABCMeta
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, SupportsIndex, TypeVar

T = TypeVar("T")
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))


class Component(metaclass=ABCMeta):
    """Base of all classes that a class from outside the package may take the place of.

    A class counts as a policy, task, reward, ... if it has the abstract methods of that base and
    they take as many arguments; it need not derive from the base or have annotations. Type checkers
    accept only derived classes. :func:`checked_component` adds what else such a class leaves out.
    """

    graph_safe: bool
    """Whether a CUDA graph can hold its part of a step: nothing is read on the host or uploaded, no
    shape depends on values. Ours can unless they say otherwise, others if they say so."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.graph_safe = vars(cls).get("graph_safe", _is_ours(cls))

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        """Whether a class has the methods; ``FullWindow`` and the like require it to derive."""
        return (Component in cls.__bases__ and difference(other, cls) is None) or NotImplemented


def _is_ours(kind: type) -> bool:
    return kind.__module__.split(".")[0] == __name__.split(".")[0]


def raised_in(error: BaseException) -> str:
    """Returns `` (FILE, line N)`` if an error comes from a class outside the package, else nothing.

    Of the lines that it passed, those of libraries do not count: the class handed them its values.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    package = str(Path(__file__).parents[1])
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        # An error that our own code raised last has a message of its own.
        if frame.filename.startswith(package):
            break
        is_library = frame.filename.startswith((*_LIBRARIES, "<")) or "-packages" in frame.filename
        if not is_library:
            return f" ({type(error).__name__} in {frame.filename}, line {frame.lineno})"
    return ""


def source_digests(components: Iterable[object]) -> dict[str, str]:
    """Digests of the files outside the package that define the objects' classes, by class."""
    digests = {}
    for kind in map(type, components):
        # Classes of a notebook or of standard input have no file.
        path = getattr(sys.modules.get(kind.__module__), "__file__", None)
        if path and not _is_ours(kind):
            sha = hashlib.sha256(Path(path).read_bytes()).hexdigest()
            digests[f"{kind.__module__}.{kind.__qualname__}"] = sha[:16]
    return digests


def difference(kind: type, base: type) -> str | None:
    """Says how a class fails to implement a base's abstract methods; ``None`` if it has them."""
    names = sorted(getattr(base, "__abstractmethods__", ()))
    methods: dict[str, Any] = {name: getattr(kind, name, None) for name in names}
    missing = [
        f"'{name}'"
        for name, method in methods.items()
        if not callable(method) or getattr(method, "__isabstractmethod__", False)
    ]
    if missing:
        message = f"method{'s' * (len(missing) > 1)} {', '.join(missing)}"
        return f"{kind.__name__} has no {message}, which {base.__name__} asks for"
    for name, method in methods.items():
        expected = inspect.signature(getattr(base, name)).parameters.values()
        keywords = {one.name: None for one in expected if one.kind is one.KEYWORD_ONLY}
        # Names of positional parameters are free, as the callers pass them in order. A callable
        # that is no function is taken on trust: its signature may not have ``self``.
        if not inspect.isfunction(inspect.getattr_static(kind, name)):
            continue
        try:
            inspect.signature(method).bind(*[None] * (len(expected) - len(keywords)), **keywords)
        except TypeError:
            return (
                f"{kind.__name__}.{name} takes ({', '.join(inspect.signature(method).parameters)}) "
                f"but {base.__name__} asks for ({', '.join(one.name for one in expected)})"
            )
    return None


def checked_component(given: T, base: type, *, option: str) -> T:
    """Returns the object; it gets a base's defaults for members that its class leaves out.

    The base's abstract methods are required, and so are attributes without a value. Errors call the
    object ``option``.
    """
    members = {**dict.fromkeys(inspect.get_annotations(base)), **vars(base)}
    # Properties are not evaluated, since their values may be read from disk.
    missing = [
        name
        for name in members
        if not name.startswith("_") and inspect.getattr_static(given, name, members) is members
    ]
    message = difference(type(given), base)
    if message is None and (required := [name for name in missing if name not in vars(base)]):
        message = (
            f"{type(given).__name__} has no attribute '{required[0]}', which "
            f"{base.__name__} asks for"
        )
    if message is not None:
        raise ValueError(f"{option}: {message}")
    return _with_members(given, base, missing) if missing else given


def _with_members(given: T, base: type, names: Sequence[str]) -> T:
    """Gives the object, in place, a class of its own: its class with members of a base added.

    The user's class stays as it is, since other objects of it may take the place of another base.
    """
    kind: Any = type(given)

    def reduce(self: Any, protocol: SupportsIndex) -> Any:
        # Pickle finds classes by name, which leads to the user's class: objects are made of that
        # one, and receive their members anew before their state.
        make, arguments, *state = kind.__reduce_ex__(self, protocol)
        plain = [kind if one is own else one for one in arguments]
        return _restored, (base, names, make, *plain), *state

    added = {name: vars(base)[name] for name in names}
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    # Without slots of its own the class has the memory layout that an object can change to.
    added |= {**named, "__doc__": kind.__doc__, "__slots__": (), "__reduce_ex__": reduce}
    own = type(kind)(kind.__name__, (kind,), added)
    object.__setattr__(given, "__class__", own)  # frozen dataclasses refuse the plain assignment
    return given


def _restored(base: type, names: Sequence[str], make: Callable[..., Any], *arguments: Any) -> Any:
    return _with_members(make(*arguments), base, names)
