"""The untrusted side: loads the candidate's code and answers calls until it is killed.

Nothing here is secret: the process knows the code and the arguments of the present call. Whatever
the candidate does to it, all that can change is which plain values go back.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import types
from typing import Any, NoReturn

from . import wire

MOST_OUTPUT = 1 << 20
"""Characters that a program may print."""
_MODULE = "candidate"


class _CappedText(io.StringIO):
    """Collects printed text and refuses what is too much."""

    def write(self, text: str) -> int:
        if self.tell() + len(text) > MOST_OUTPUT:
            raise OSError("too much output")
        return super().write(text)


class _Worker:
    def __init__(self, channel: wire.Channel, config: dict[str, Any]) -> None:
        self._channel = channel
        self._value_bytes = int(config["value_bytes"])
        self._module = types.ModuleType(_MODULE)
        self._objects: list[Any] = []

    def serve(self) -> None:
        while True:
            request = wire.parse(self._channel.receive())
            try:
                reply = {"id": request["id"], "value": self._answer(request)}
            except BaseException as error:  # SystemExit and all else is the candidate's
                reply = {"id": request["id"], "error": _describe(error)}
            # What cannot be sent is the candidate's error too.
            try:
                self._channel.send(reply)
            except (wire.WireError, RecursionError) as error:
                self._channel.send({"id": request["id"], "error": _describe(error)})

    def _answer(self, request: dict[str, Any]) -> Any:
        if request["op"] == "load":
            return self._load(request["code"])
        if request["op"] == "program":
            return self._run_program(request["code"], request["stdin"])
        subject = self._object(request["target"])
        args, kwargs = (
            wire.decode(request[name], from_handle=self._object) for name in ("args", "kwargs")
        )
        if request["op"] == "call":
            value = subject(*args, **kwargs)
        else:
            value = (setattr if request["op"] == "set" else getattr)(subject, *args)
        return wire.encode(value, max_bytes=self._value_bytes, to_handle=self._keep)

    def _object(self, target: int | str) -> Any:
        """What a handle stands for: an object that was returned before, or a name."""
        return self._objects[target] if type(target) is int else getattr(self._module, str(target))

    def _keep(self, value: Any) -> int:
        self._objects.append(value)
        return len(self._objects) - 1

    def _load(self, code: str) -> list[str]:
        # Dataclasses and pickles look their module up.
        sys.modules[_MODULE] = self._module
        exec(_compile(code), self._module.__dict__)
        return [str(name) for name, value in self._module.__dict__.items() if callable(value)]

    def _run_program(self, code: str, stdin: str) -> str:
        captured = _CappedText()
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        compiled = _compile(code)
        sys.stdin = io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")
        with contextlib.redirect_stdout(captured):
            try:
                exec(compiled, module.__dict__)
            except SystemExit as end:
                if end.code not in (None, 0):
                    raise
        return captured.getvalue()


def _compile(code: str) -> types.CodeType:
    try:
        return compile(code, "<candidate>", "exec", dont_inherit=True)
    except (ValueError, RecursionError, MemoryError, OverflowError) as error:
        raise SyntaxError(f"{type(error).__name__}: {error}") from None


def _describe(error: BaseException) -> list[Any]:
    """Type name, one line of message, and whether the code did not even compile."""
    try:
        message = str(error.msg if isinstance(error, SyntaxError) else error)
        message = message.strip().split("\n", maxsplit=1)[0][:300]
    except BaseException:  # the candidate's own __str__ may do anything
        message = ""
    if isinstance(error, SyntaxError) and isinstance(error.lineno, int):
        message = f"{message} (line {error.lineno})"
    return [type(error).__name__[:100], message.encode("utf-8", "replace").decode()]


def main(read_fd: int, write_fd: int, config: dict[str, Any]) -> NoReturn:
    """Serves requests; the caller has put the walls up already.

    Of the driver's settings it takes ``value_bytes`` and ``library_paths``.
    """
    sys.path += config["library_paths"]
    sys.dont_write_bytecode = True
    os.environ.clear()
    # One thread per numeric library: threads count as processes against the limit.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    channel = wire.Channel(read_fd, write_fd, max_bytes=int(config["value_bytes"]))
    with contextlib.suppress(wire.ChannelClosedError, wire.WireError):
        channel.send("ready")
        _Worker(channel, config).serve()
    os._exit(0)
