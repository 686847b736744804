"""The untrusted side: loads the candidate's code and answers calls until it is killed.

If the candidate is a program, this process becomes the program, and ends with it.

Nothing here is secret: the process knows the code and the arguments of the current call. Whatever
the candidate does to it, all that can change is which plain values are sent back.
"""

from __future__ import annotations

import _io
import _thread
import builtins
import contextlib
import gc
import io
import os
import sys
import types
from _sitebuiltins import Quitter
from collections.abc import Iterator
from typing import Any, NoReturn

from . import wire

_MODULE = "candidate"
_STANDARD_FILES = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}


class _Worker:
    def __init__(self, channel: wire.Channel, config: dict[str, Any]) -> None:
        self._channel = channel
        self._value_bytes = int(config["value_bytes"])
        self._module = types.ModuleType(_MODULE)
        self._objects: dict[int, Any] = {}
        self.program: types.CodeType | None = None  # after it no request is answered

    def serve(self) -> None:
        while self.program is None:
            request = wire.parse(self._channel.receive())
            try:
                reply = {"id": request["id"], "value": self._answer(request)}
            except BaseException as error:  # SystemExit and all else come from the candidate
                reply = {"id": request["id"], "error": _error_parts(error)}
            # What cannot be sent is the candidate's error too.
            try:
                self._channel.send(reply)
            except (wire.WireError, RecursionError) as error:
                self._channel.send({"id": request["id"], "error": _error_parts(error)})

    def _answer(self, request: dict[str, Any]) -> Any:
        if "multiprocessing" in request.get("code", ""):
            from multiprocessing.context import BaseContext

            # Its pools of threads make locks in memory that processes share, and there is none.
            BaseContext.Lock = lambda _: _thread.allocate_lock()  # type: ignore
        if request["op"] == "load":
            return self._load(request["code"])
        if request["op"] == "program":
            self.program = _compile(request["code"])
            return None
        subject = self._object(request["target"])
        args, kwargs = (
            wire.decode(request[name], from_handle=self._object) for name in ("args", "kwargs")
        )
        if request["op"] == "call":
            value = subject(*args, **kwargs)
        else:
            value = (setattr if request["op"] == "set" else getattr)(subject, *args)
        encoded = self._encode(value)
        if "in_place" not in request:
            return encoded
        changed = self._changed(request, args, kwargs) if value is None else ()
        return ["t", encoded, ["d", *changed]]

    def _changed(self, request: dict[str, Any], args: Any, kwargs: Any) -> Iterator[Any]:
        """Yields the number and the new content, in turn, of containers that a call changed."""
        before = [*request["args"][1:], *request["kwargs"][2::2]]
        for number, (old, value) in enumerate(zip(before, (*args, *kwargs.values()), strict=True)):
            if isinstance(value, wire.CONTAINERS) and (new := self._encode(value)) != old:
                yield from (number, new)

    def _encode(self, value: Any) -> Any:
        return wire.encode(value, max_bytes=self._value_bytes, to_handle=self._keep)

    def _object(self, target: int | str) -> Any:
        """Returns what a handle refers to: an object that was returned before, or a name."""
        return self._objects[target] if type(target) is int else getattr(self._module, str(target))

    def _keep(self, value: Any) -> int:
        self._objects[id(value)] = value
        return id(value)

    def _load(self, code: str) -> list[str]:
        # Dataclasses and pickles look up their module.
        sys.modules[_MODULE] = self._module
        exec(_compile(code), self._module.__dict__)
        return [str(name) for name, value in self._module.__dict__.items() if callable(value)]


def _compile(code: str) -> types.CodeType:
    try:
        return compile(code, "<candidate>", "exec", dont_inherit=True)
    except (ValueError, RecursionError, MemoryError, OverflowError) as error:
        raise SyntaxError(f"{type(error).__name__}: {error}") from None


def _error_parts(error: BaseException) -> list[Any]:
    """Returns the type's name and one line of message, with the line of a syntax error."""
    try:
        message = str(error.msg if isinstance(error, SyntaxError) else error)
        message = message.strip().split("\n", maxsplit=1)[0][:300]
    except BaseException:  # the candidate's own __str__ may do anything
        message = ""
    if isinstance(error, SyntaxError) and isinstance(error.lineno, int):
        message = f"{message} (line {error.lineno})"
    return [type(error).__name__[:100], message.encode("utf-8", "replace").decode()]


def main(read_fd: int, write_fd: int, config: dict[str, Any]) -> NoReturn:
    """Serves requests; the caller, whose ``config`` it is, has put up the walls already."""
    sys.path += config["library_paths"]
    sys.dont_write_bytecode = True
    # What the loader needed to start; a path of the run's machine is no business of the candidate.
    os.environ.clear()
    # One thread per numeric library: threads count as processes against the limit.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    channel = wire.Channel(read_fd, write_fd, max_bytes=int(config["value_bytes"]))
    worker = _Worker(channel, config)
    with contextlib.suppress(wire.ChannelClosedError, wire.WireError):
        channel.send("ready")
        worker.serve()
    if worker.program is None:
        os._exit(0)
    # A program could forge replies; but from now on nobody reads any.
    os.close(read_fd)
    os.close(write_fd)
    _run_as_main(worker.program)
    sys.exit()


def _open(file: Any, *args: Any, **kwargs: Any) -> Any:
    """Opens a file, also one that stands for a descriptor, which without /proc does not exist."""
    standard = _STANDARD_FILES.get(str(file))
    return _io.open(file if standard is None else os.dup(standard), *args, **kwargs)


def _run_as_main(program: types.CodeType) -> None:
    """Runs a program as ``python main.py`` would; its exceptions are left to the interpreter."""
    gc.freeze()  # no copies of the driver's pages while the interpreter ends
    for name in ("exit", "quit"):  # which the module ``site`` would define
        setattr(builtins, name, Quitter(name, "Ctrl-D (i.e. EOF)"))
    builtins.open = io.open = _open
    sys.argv[:] = ["main.py"]
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    exec(program, module.__dict__)
