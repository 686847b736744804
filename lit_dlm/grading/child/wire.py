"""Plain values on a pipe: tagged JSON, rebuilt with exact builtin types and nothing else.

Model-written code hands its results to trusted code through this format, so decoding can only ever
yield builtin objects: no class of the candidate, no ``__eq__`` of the candidate, no pickle.

Scalars that JSON keeps exactly (``None``, ``bool``, small ``int``, ``float``, ``str``) stand for
themselves; everything else is a list whose first element is a tag:

======  ==========================================  ==========================================
tag     Python value                                rest of the list
======  ==========================================  ==========================================
``l``   ``list``                                    items
``t``   ``tuple`` (named tuples become plain)       items
``s``   ``set``                                     items
``z``   ``frozenset``                               items
``d``   ``dict`` (subclasses become plain)          ``[key, value]`` pairs in order
``i``   ``int`` beyond 53 bits                      hexadecimal text
``b``   ``bytes``                                   hexadecimal text
``y``   ``bytearray``                               hexadecimal text
``c``   ``complex``                                 real part, imaginary part
``r``   ``range``                                   start, stop, step
``q``   ``collections.deque``                       items
``e``   an iterator, drained by the encoder         items
``v``   a view of a ``dict``                        ``keys``, ``values`` or ``items``, items
``a``   ``numpy.ndarray``, as nested lists          one encoded value
``n``   a builtin type such as ``int``              its name
``h``   a handle: the value stays where it is       a number
======  ==========================================  ==========================================
"""

from __future__ import annotations

import builtins
import collections
import json
import os
import select
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_HEADER = struct.Struct(">I")
_EXACT_INT = 1 << 53


class WireError(ValueError):
    """A value that cannot be sent, or bytes that are no value."""


class ChannelClosedError(Exception):
    """The other end went away."""


class ChannelTimeoutError(Exception):
    """The other end did not answer by the deadline."""


class _Encoder:
    """One encoding pass; counts nodes so that shared sub-objects cannot blow up without end."""

    def __init__(self, max_nodes: int, to_handle: Callable[[Any], int] | None) -> None:
        self._nodes_left = max_nodes
        self._to_handle = to_handle

    def encode(self, value: Any) -> Any:
        self._spend(1)
        if value is None or value is True or value is False:
            return value
        if isinstance(value, int):
            plain = int.__add__(value, 0)
            if -_EXACT_INT < plain < _EXACT_INT:
                return plain
            self._spend(plain.bit_length() // 64)
            return ["i", hex(plain)]
        if isinstance(value, float):
            return float.__mul__(value, 1.0)  # exact, and a plain float for a subclass
        if isinstance(value, str):
            self._spend(len(value) // 8)
            return str.__str__(value)
        return self._encode_container(value)

    def _spend(self, nodes: int) -> None:
        self._nodes_left -= nodes
        if self._nodes_left < 0:
            raise WireError("the value is too large to be sent")

    def _items(self, values: Iterable[Any]) -> list[Any]:
        return [self.encode(v) for v in values]

    def _encode_container(self, value: Any) -> Any:
        # Unbound base-class iterators: a subclass cannot show one content and hide another.
        for base, tag in _SEQUENCES:
            if isinstance(value, base):
                items = list(base.__iter__(value))
                if _are_plain(items):
                    self._spend(len(items))
                    return [tag, *items]
                return [tag, *self._items(items)]
        if isinstance(value, dict):
            return ["d", *([self.encode(k), self.encode(v)] for k, v in dict.items(value))]
        if isinstance(value, bytes | bytearray):
            self._spend(len(value) // 4)
            return ["b" if isinstance(value, bytes) else "y", bytes(value).hex()]
        if isinstance(value, complex):
            return ["c", value.real, value.imag]
        if isinstance(value, range):
            return ["r", *self._items((value.start, value.stop, value.step))]
        name = getattr(value, "__name__", None) if isinstance(value, type) else None
        if name is not None and getattr(builtins, name, None) is value:
            return ["n", name]
        for view, kind in _VIEWS:
            if isinstance(value, view):
                return ["v", kind, *self._items(view.__iter__(value))]
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            if isinstance(value, numpy.generic):
                return self.encode(value.item())
            if isinstance(value, numpy.ndarray):
                return ["a", self.encode(value.tolist())]
        if isinstance(value, Iterator):
            return ["e", *self._items(value)]
        if self._to_handle is not None:
            return ["h", self._to_handle(value)]
        raise WireError(f"a value of type {type(value).__name__} cannot be sent")


def _are_plain(items: list[Any]) -> bool:
    """Whether all items stand for themselves: the fast way for long leaves."""
    types = set(map(type, items))
    if not types <= _PLAIN_TYPES:
        return False
    if int not in types:
        return True
    return types == {int} and min(items) > -_EXACT_INT and max(items) < _EXACT_INT


_PLAIN_TYPES = {int, float, str, bool, type(None)}
_SEQUENCES: tuple[tuple[Any, str], ...] = (
    (list, "l"),
    (tuple, "t"),
    (set, "s"),
    (frozenset, "z"),
    (collections.deque, "q"),
)
_VIEWS: tuple[tuple[Any, str], ...] = (
    (type({}.keys()), "keys"),
    (type({}.values()), "values"),
    (type({}.items()), "items"),
)


def encode(
    value: Any, *, max_bytes: int = 1 << 26, to_handle: Callable[[Any], int] | None = None
) -> Any:
    """Turns a value, any nesting of the types in the module's table, into JSON types.

    Args:
        value: The value.
        max_bytes: Rough bound on the size of the result; larger values are refused.
        to_handle: Registers an object that cannot be sent and returns its number; without it such
            an object is an error.
    """
    try:
        return _Encoder(max_bytes // 2, to_handle).encode(value)
    except RecursionError:
        raise WireError("the value is nested too deeply or contains itself") from None


def decode(wire: Any, *, from_handle: Callable[[int], Any] | None = None) -> Any:
    """Rebuilds a value, of exact builtin types only, from a structure that may be hostile.

    ``from_handle`` makes the object that stands for a handle; without it handles are an error.
    """
    try:
        return _decode(wire, from_handle)
    except (TypeError, ValueError, IndexError, OverflowError, RecursionError) as error:
        raise WireError(f"malformed value: {type(error).__name__}") from None


def _decode(wire: Any, from_handle: Callable[[int], Any] | None) -> Any:
    if wire is None or type(wire) in (bool, int, float, str):
        return wire
    if type(wire) is not list or not wire or type(wire[0]) is not str:
        raise WireError("malformed value")
    tag, rest = wire[0], wire[1:]
    if tag in _FROM_ITEMS:
        if _are_plain(rest):
            return _FROM_ITEMS[tag](rest)
        return _FROM_ITEMS[tag]([_decode(item, from_handle) for item in rest])
    if tag == "d":
        return {_decode(k, from_handle): _decode(v, from_handle) for k, v in rest}
    if tag == "i":
        return int(rest[0], 16)
    if tag in ("b", "y"):
        raw = bytes.fromhex(rest[0])
        return raw if tag == "b" else bytearray(raw)
    if tag == "c":
        return complex(rest[0], rest[1])
    if tag == "r":
        return range(*(_decode(item, from_handle) for item in rest))
    if tag == "v":
        items = [_decode(item, from_handle) for item in rest[1:]]
        if rest[0] == "keys":
            return dict.fromkeys(items).keys()
        return dict(items).items() if rest[0] == "items" else dict(enumerate(items)).values()
    if tag == "a":
        return _decode(rest[0], from_handle)
    if tag == "n" and isinstance(builtin := getattr(builtins, rest[0], None), type):
        return builtin
    if tag == "h" and from_handle is not None and type(rest[0]) is int:
        return from_handle(rest[0])
    raise WireError(f"malformed value: tag {tag[:10]!r}")


_FROM_ITEMS: dict[str, Callable[[list[Any]], Any]] = {
    "l": list,
    "t": tuple,
    "s": set,
    "z": frozenset,
    "q": collections.deque,
    "e": iter,
}


def parse(message: bytes) -> Any:
    """Parses one message's text."""
    try:
        return json.loads(message)
    except (ValueError, RecursionError):
        raise WireError("a message is not JSON") from None


def pack(messages: Iterable[bytes]) -> bytes:
    """Joins messages, each with its length in front."""
    return b"".join(_HEADER.pack(len(message)) + message for message in messages)


def unpack(stream: bytes) -> list[bytes]:
    """Splits what :func:`pack` joined."""
    messages = []
    position = 0
    while position < len(stream):
        start = position + _HEADER.size
        if start > len(stream):
            raise WireError("a message is cut off")
        position = start + _HEADER.unpack_from(stream, position)[0]
        messages.append(stream[start:position])
    if position != len(stream):
        raise WireError("a message is cut off")
    return messages


class Channel:
    """JSON messages over two file descriptors, each with a 4-byte big-endian length in front."""

    def __init__(self, read_fd: int, write_fd: int, *, max_bytes: int) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._max_bytes = max_bytes

    def send(self, message: Any, *, deadline: float | None = None) -> None:
        """Writes one message of JSON types.

        By the ``deadline``, a value of ``time.monotonic()``, the other end must have taken it; the
        descriptor must then be non-blocking.
        """
        body = json.dumps(message, separators=(",", ":")).encode()
        if len(body) > self._max_bytes:
            raise WireError(f"a message of {len(body)} bytes is over {self._max_bytes}")
        view = memoryview(_HEADER.pack(len(body)) + body)
        while view:
            try:
                view = view[os.write(self._write_fd, view) :]
            except BlockingIOError:
                _wait([], [self._write_fd], deadline)
            except BrokenPipeError:
                raise ChannelClosedError from None

    def receive(self) -> Any:
        """Reads one message, as ``json.loads`` makes it; waits for ever."""
        return parse(self.receive_bytes())

    def receive_bytes(self, *, deadline: float | None = None) -> bytes:
        """Like :meth:`receive`, but leaves the message as text."""
        (length,) = _HEADER.unpack(self._read_exactly(_HEADER.size, deadline))
        if length > self._max_bytes:
            raise WireError(f"a message of {length} bytes is over {self._max_bytes}")
        return self._read_exactly(length, deadline)

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
    ready = select.select(readable, writable, [], timeout)
    if not ready[0] and not ready[1]:
        raise ChannelTimeoutError
