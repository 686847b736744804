"""Peak resident memory of this process and of forked children, on Linux."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")

Result = TypeVar("Result")


def reset_peak() -> int:
    """Sets the peak to what is resident now, which it returns, in bytes.

    Raises:
        SystemExit: this is not Linux.
    """
    try:
        _CLEAR.write_text("5")
    except OSError as error:
        raise SystemExit(f"{_CLEAR}: memory can be measured on Linux only ({error})") from error
    return _bytes("VmRSS")


def peak() -> int:
    """Most bytes that were resident since :func:`reset_peak`."""
    return _bytes("VmHWM")


def in_child(work: Callable[[], Result]) -> Result:
    """Runs something in a forked child, where memory of earlier work cannot hide what it takes.

    Args:
        work: returns what JSON can hold.

    Returns:
        Its result.

    Raises:
        SystemExit: the child failed.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.write(writer, json.dumps(work()).encode())
            status = 0
        finally:
            os._exit(status)  # the rest of the program is the parent's
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise SystemExit("the process that measures memory failed")
    result: Result = json.loads(text)
    return result


def _bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"{_STATUS} has no {field}: memory can be measured on Linux only")
