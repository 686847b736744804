"""Plain values on a pipe: tagged JSON, rebuilt with exact builtin types and nothing else.

Model-written code hands its results to trusted code through this format, so decoding can only ever
yield objects of the standard library's own types and of :class:`Named`: no class of the candidate,
no ``__eq__`` of the candidate, no pickle.

Scalars that JSON keeps exactly (``None``, ``bool``, small ``int``, ``float``, ``str``) are sent as
they are; everything else is a list of a tag (:data:`_FORMS`) and encoded parts. Subclasses become
their base, NumPy's arrays nested lists. The tag ``h`` is a handle: the value stays where it is.
"""

from __future__ import annotations

import builtins
import collections
import datetime as dt
import functools
import json
import os
import select
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from fractions import Fraction
from itertools import chain, islice
from operator import index
from typing import Any, NamedTuple

_HEADER = struct.Struct(">I")
_EXACT_INT = 1 << 53
_PLAIN_TYPES = {int, float, str, bool, type(None)}
CONTAINERS: tuple[Any, ...] = (list, dict, set, collections.deque, bytearray)
"""What a call may change in place."""


@functools.cache
def _types() -> dict[Any, type]:
    return {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)}


class WireError(ValueError):
    """A value that cannot be sent, or bytes that are not a value."""


class ChannelClosedError(Exception):
    """The other end went away."""


class ChannelTimeoutError(Exception):
    """The other end did not answer by the deadline."""


class Named(tuple[Any, ...]):
    """A named tuple without its class: its fields are attributes of this one object."""


class _Form(NamedTuple):
    kind: Any
    parts: Callable[[Any], Iterable[Any]]
    rebuild: Callable[[list[Any]], Any]


def _pairs(parts: list[Any]) -> dict[Any, Any]:
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _named(parts: list[Any]) -> Named:
    value = Named(parts[1:])
    # No name can change what operators look up: they ask the class, and for no such name.
    if not all(type(name) is str and name.isidentifier() and name[0] != "_" for name in parts[0]):
        raise ValueError("not the names of fields")
    vars(value).update(zip(parts[0], value, strict=True), _fields=parts[0])
    return value


_FORMS = {
    # Unbound iterators of the base: a subclass cannot show one content and hide another.
    "l": _Form(list, list.__iter__, list),
    "t": _Form(tuple, tuple.__iter__, tuple),
    "s": _Form(set, set.__iter__, set),
    "z": _Form(frozenset, frozenset.__iter__, frozenset),
    "q": _Form(collections.deque, collections.deque.__iter__, collections.deque),
    "d": _Form(dict, lambda value: chain.from_iterable(dict.items(value)), _pairs),
    "i": _Form(int, lambda value: [hex(value)], lambda parts: int(parts[0], 16)),
    "b": _Form(bytes, lambda value: [value.hex()], lambda parts: bytes.fromhex(parts[0])),
    "y": _Form(bytearray, lambda value: [value.hex()], lambda parts: bytearray.fromhex(parts[0])),
    "c": _Form(complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "r": _Form(range, lambda r: [r.start, r.stop, r.step], lambda parts: range(*parts)),
    "k": _Form(type({}.keys()), iter, lambda parts: dict.fromkeys(parts).keys()),
    "v": _Form(type({}.values()), iter, lambda parts: dict(enumerate(parts)).values()),
    "m": _Form(type({}.items()), iter, lambda parts: dict(parts).items()),
    "e": _Form(Iterator, iter, iter),  # drained by the encoder
    "a": _Form(dt.datetime, lambda v: [v.isoformat()], lambda p: dt.datetime.fromisoformat(*p)),
    "j": _Form(dt.date, lambda v: [v.isoformat()], lambda p: dt.date.fromisoformat(*p)),
    "o": _Form(dt.time, lambda v: [v.isoformat()], lambda p: dt.time.fromisoformat(*p)),
    "u": _Form(dt.timedelta, lambda v: [0, 0, v // v.resolution], lambda p: dt.timedelta(*p)),
    # A text alone: of a fraction, a text such as 1e999999999 would be computed.
    "x": _Form(Decimal, lambda v: [str(v)], lambda parts: Decimal(str.strip(*parts))),
    "f": _Form(Fraction, Fraction.as_integer_ratio, lambda parts: Fraction(*map(index, parts))),
    "p": _Form((), iter, _named),
    "n": _Form((), iter, lambda parts: _types()[parts[0]]),
}
"""By tag: the type it stands for, which parts of a value are sent, and how to rebuild the value."""


class _Encoder:
    """One encoding pass; counts nodes so that shared sub-objects cannot grow without bound."""

    def __init__(self, max_nodes: int, to_handle: Callable[[Any], Any] | None) -> None:
        self._nodes_left = max_nodes
        self._to_handle = to_handle

    def encode(self, value: Any) -> Any:
        self._spend(1)
        if value is None or value is True or value is False:
            return value
        if isinstance(value, int):
            value = int.__add__(value, 0)
            if -_EXACT_INT < value < _EXACT_INT:
                return value
        if isinstance(value, float):
            return float.__mul__(value, 1.0)  # exact, and a plain float for a subclass
        if isinstance(value, str):
            self._spend(len(value) // 8)
            return str.__str__(value)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray):
            return self.encode(value.tolist())
        return self._encode_parts(value)

    def _encode_parts(self, value: Any) -> list[Any]:
        if isinstance(value, tuple) and (names := getattr(value, "_fields", ())):
            return ["p", self.encode(list(names)), *map(self.encode, tuple.__iter__(value))]
        for tag, form in _FORMS.items():
            if isinstance(value, form.kind):
                # An iterator may have no end.
                items = list(islice(form.parts(value), self._nodes_left + 1))
                if _are_plain(items):
                    self._spend(len(items) + sum(len(i) // 8 for i in items if type(i) is str))
                    return [tag, *items]
                return [tag, *map(self.encode, items)]
        if isinstance(value, type) and _types().get(getattr(value, "__name__", None)) is value:
            return ["n", value.__name__]
        if self._to_handle is None:
            raise WireError(f"a value of type {type(value).__name__} cannot be sent")
        return ["h", self._to_handle(value)]

    def _spend(self, nodes: int) -> None:
        self._nodes_left -= nodes
        if self._nodes_left < 0:
            raise WireError("the value is too large to be sent")


def _are_plain(items: list[Any]) -> bool:
    """Whether all items are sent as they are, which is the fast path for long leaves."""
    types = set(map(type, items))
    if not types <= _PLAIN_TYPES:
        return False
    if int not in types:
        return True
    return types == {int} and min(items) > -_EXACT_INT and max(items) < _EXACT_INT


def encode(
    value: Any, *, max_bytes: int = 1 << 26, to_handle: Callable[[Any], Any] | None = None
) -> Any:
    """Turns a value into JSON types; refuses one that would take more than about ``max_bytes``.

    ``to_handle`` registers an object that cannot be sent and returns its handle; without it such an
    object is an error.
    """
    try:
        return _Encoder(max_bytes // 2, to_handle).encode(value)
    except RecursionError:
        raise WireError("the value is nested too deeply or contains itself") from None


def decode(wire: Any, *, from_handle: Callable[[Any], Any] | None = None) -> Any:
    """Rebuilds a value, of exact builtin types (or handles) only, from what may be hostile."""
    # Whatever a constructor of _FORMS makes of hostile parts is an error of these kinds.
    try:
        return _decode(wire, from_handle)
    except (TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
        raise WireError(f"malformed value: {type(error).__name__}") from None


def _decode(wire: Any, from_handle: Callable[[Any], Any] | None) -> Any:
    if type(wire) in _PLAIN_TYPES:
        return wire
    tag, *parts = wire if type(wire) is list else [None]
    if not _are_plain(parts):
        parts = [_decode(part, from_handle) for part in parts]
    if type(tag) is str and tag in _FORMS:
        return _FORMS[tag].rebuild(parts)
    if tag == "h" and from_handle is not None and type(parts[0]) in (int, str):
        return from_handle(parts[0])
    raise WireError("malformed value")


def parse(message: bytes) -> Any:
    """Parses a message."""
    try:
        return json.loads(message)
    except (ValueError, RecursionError):
        raise WireError("a message is not JSON") from None


class Channel:
    """JSON messages over two file descriptors, each with a 4-byte big-endian length in front."""

    def __init__(self, read_fd: int, write_fd: int, *, max_bytes: int) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._max_bytes = max_bytes

    def send(self, message: Any, *, deadline: float | None = None) -> None:
        """Writes JSON types; a ``deadline`` (monotonic) needs a non-blocking descriptor."""
        body = json.dumps(message, separators=(",", ":")).encode()
        self._check_size(len(body))
        view = memoryview(_HEADER.pack(len(body)) + body)
        while view:
            try:
                view = view[os.write(self._write_fd, view) :]
            except BlockingIOError:
                _wait([], [self._write_fd], deadline)
            except BrokenPipeError:
                raise ChannelClosedError from None

    def receive(self, *, deadline: float | None = None) -> bytes:
        # Checked before the message is read: the other end may announce 4 GB.
        (length,) = _HEADER.unpack(self._read_exactly(_HEADER.size, deadline))
        self._check_size(length)
        return self._read_exactly(length, deadline)

    def _check_size(self, length: int) -> None:
        if length > self._max_bytes:
            raise WireError(f"a message of {length} bytes is over {self._max_bytes}")

    def _read_exactly(self, size: int, deadline: float | None) -> bytes:
        chunks = []
        while size:
            _wait([self._read_fd], [], deadline)
            chunk = os.read(self._read_fd, min(size, 1 << 20))
            if not chunk:
                raise ChannelClosedError
            chunks.append(chunk)
            size -= len(chunk)
        return b"".join(chunks)


def _wait(readable: list[int], writable: list[int], deadline: float | None) -> None:
    timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
    if not any(select.select(readable, writable, [], timeout)):
        raise ChannelTimeoutError
