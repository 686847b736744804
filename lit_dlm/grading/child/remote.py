"""The trusted side's view of the candidate: proxies whose calls travel to the worker and back."""

from __future__ import annotations

import builtins
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from . import wire


class WorkerLostError(BaseException):
    """The worker cannot answer any more; no test's ``except Exception`` may catch this."""

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


class CandidateError(Exception):
    """The candidate raised something that no builtin exception class can represent."""


class Handle:
    """A proxy for an object that stays in the worker; equal to nothing but itself.

    It can be called, and its public attributes read and set (tests build trees of ``Node``).
    """

    def __init__(self, remote: Remote, target: int | str) -> None:
        """``target``: a number that the worker sent, or a name in the candidate's module."""
        object.__setattr__(self, "_remote", remote)
        object.__setattr__(self, "_target", target)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._remote.ask("call", self._target, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._remote.ask("get", self._target, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._remote.ask("set", self._target, name, value)


class Remote:
    """Sends requests to one worker, in order, under one deadline that starts when it is ready."""

    def __init__(
        self,
        channel: wire.Channel,
        *,
        wall_seconds: float,
        call_seconds: float,
        value_bytes: int,
        explain_end: Callable[[], tuple[str, str]],
    ) -> None:
        # Time starts when the worker is ready: its walls cost the candidate nothing, however busy
        # the machine. ``explain_end`` returns a status and a detail once the worker has ended.
        self._explain_end = explain_end
        self._channel = channel
        self._wall_seconds = wall_seconds
        self._call_seconds = call_seconds
        self._deadline = 0.0
        self._value_bytes = value_bytes
        self._next_id = 0
        self._handles: dict[int | str, Handle] = {}  # one for each object
        self.failure: tuple[str, str] | None = None  # of the first candidate error, even if caught
        self.unsent = ""  # why an argument could not be sent, even if a test caught it

    def wait_until_ready(self) -> None:
        """Waits for the worker's first message, sent before it sees any candidate code."""
        self._channel.receive()
        self._deadline = time.monotonic() + self._wall_seconds

    def load(self, code: str) -> list[str]:
        names = self._request({"op": "load", "code": code})
        _require(type(names) is list)
        return [name for name in names if type(name) is str]

    def start_program(self, code: str) -> None:
        """Makes the worker run the candidate's program, out of reach; returns once it compiled."""
        self._request({"op": "program", "code": code})

    def seconds_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def ask(self, op: str, target: str | int, /, *args: Any, **kwargs: Any) -> Any:
        arguments = {"args": self._encode(args), "kwargs": self._encode(kwargs)}
        reply = self._request({"op": op, "target": target, **arguments, "in_place": True})
        with _malformed_is_lost():
            both = wire.decode(reply, from_handle=self._handle)
        _require(type(both) is tuple and len(both) == 2 and type(both[1]) is dict)
        value, changed = both
        # A call that returns a value answers with it alone: no other may empty what tests compare
        # it with. One that returns nothing answers with what it changed.
        for number, argument in enumerate((*args, *kwargs.values()) if value is None else ()):
            kind = next((kind for kind in wire.CONTAINERS if isinstance(argument, kind)), None)
            if kind is not None and number in changed:
                _require(type(changed[number]) is kind)
                argument.clear()
                (argument.update if kind in (dict, set) else argument.extend)(changed[number])
        return value

    def _handle(self, target: int | str) -> Handle:
        return self._handles.setdefault(target, Handle(self, target))

    def call_encoded(self, target: str, args: Any, *, seconds: float) -> bytes:
        """Calls with encoded arguments; returns ``"value":...}`` or ``"error":...}``, unchecked."""
        deadline = min(self._deadline, time.monotonic() + seconds)
        request = {"op": "call", "target": target, "args": args, "kwargs": ["d"]}
        message = self._exchange(request, deadline)
        # Parsing is left to the comparison: most replies are equal to the expected bytes.
        beginning = f'{{"id":{self._next_id},'.encode()
        _require(message.startswith(beginning))
        return message[len(beginning) :]

    def _encode(self, value: Any) -> Any:
        try:
            return wire.encode(value, max_bytes=self._value_bytes, to_handle=_target_of)
        except wire.WireError as error:
            self.unsent = str(error)
            raise

    def _request(self, request: dict[str, Any]) -> Any:
        deadline = min(self._deadline, time.monotonic() + self._call_seconds)
        message = self._exchange(request, deadline)
        with _malformed_is_lost():
            reply = wire.parse(message)
        _require(type(reply) is dict and reply.get("id") == self._next_id)
        _require("value" in reply or "error" in reply)
        if "error" in reply:
            raise self._rebuild_error(reply["error"])
        return reply["value"]

    def _exchange(self, request: dict[str, Any], deadline: float) -> bytes:
        self._next_id += 1
        try:
            with _malformed_is_lost():
                self._channel.send({**request, "id": self._next_id}, deadline=deadline)
                return self._channel.receive(deadline=deadline)
        except wire.ChannelTimeoutError:
            raise WorkerLostError("timeout", "no answer within the time limit") from None
        except wire.ChannelClosedError:
            raise WorkerLostError(*self._explain_end()) from None

    def _rebuild_error(self, error: Any) -> Exception:
        _require(type(error) is list and [type(part) for part in error] == [str, str])
        name, message = error
        # Kept, because the tests may swallow the exception and then fail for another reason.
        status = "syntax_error" if name in _SYNTAX_ERRORS else "runtime_error"
        if self.failure is None:
            self.failure = (status, f"{name}: {message}")
        kind = getattr(builtins, name, None)
        # StopIteration would end loops of the tests, `all(map(...))` among them.
        if isinstance(kind, type) and issubclass(kind, Exception) and kind is not StopIteration:
            # Classes such as UnicodeDecodeError need more arguments.
            with contextlib.suppress(TypeError):
                return kind(message)
        return CandidateError(f"{name}: {message}")


_SYNTAX_ERRORS = ("SyntaxError", "IndentationError", "TabError")


def _require(holds: bool) -> None:
    if not holds:
        raise WorkerLostError("runtime_error", "the worker's reply is malformed")


@contextlib.contextmanager
def _malformed_is_lost() -> Iterator[None]:
    """Gives up a worker that sent something other than a value, or a value that is too large."""
    try:
        yield
    except wire.WireError as error:
        raise WorkerLostError("runtime_error", str(error)) from None


def _target_of(value: Any) -> int | str:
    if type(value) is Handle:
        target: int | str = object.__getattribute__(value, "_target")
        return target
    raise wire.WireError(f"the test passes a {type(value).__name__}, which cannot be sent")
