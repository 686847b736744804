"""What the scripts share: options, times taken in turns, peak memory, and how figures are told."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")

Result = TypeVar("Result")


def options(
    doc: str | None, arguments: Sequence[str] | None = None, **defaults: Any
) -> argparse.Namespace:
    """Reads the options of a script, and sets torch's number of threads.

    Args:
        doc: what ``--help`` prints.
        arguments: of the command line; those of this process by default.
        defaults: by option, alone or with a text for ``--help``. Where the default is
            positive, whole numbers must be, too; a list takes one or more. ``--threads`` and
            ``--json`` come along.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, given in {**defaults, "threads": 1}.items():
        value, text = given if isinstance(given, tuple) else (given, None)
        how: dict[str, Any] = {"type": type(value)}
        if isinstance(value, list):
            how = {"type": type(value[0]), "nargs": "+"}
        elif isinstance(value, bool):
            how = {"action": "store_true"}
        parser.add_argument(f"--{name}", default=value, help=text, **how)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    found = parser.parse_args(arguments)
    for name, value in vars(found).items():
        least = min(1, parser.get_default(name)) if type(value) is int else 0
        if type(value) is int and value < least:
            parser.error(f"--{name}: expected at least {least}, got {value}")
    torch.set_num_threads(found.threads)
    return found


def tell(report: Mapping[str, Any], *, as_json: bool) -> None:
    """Prints figures by name, or one JSON object."""
    if as_json:
        print(json.dumps(report))
        return
    for name, value in report.items():
        shown = f"{value:12.4g}" if isinstance(value, float) else f"{value!s:>12}"
        print(f"{name:42}{shown}")


def in_turns(
    runs: Mapping[str, Callable[[], object]],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of each run; every repetition takes all of them, one after the other."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            synchronize()
            began = clock()
            run()
            synchronize()
            seconds[name].append(clock() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


def median_seconds(work: Callable[[], object], repeats: int) -> float:
    """Median time by :func:`clock` after one run to warm up."""
    work()
    return in_turns({"work": work}, repeats, clock)["work"]


def clock() -> float:
    """Seconds of this process, which other work disturbs less; of the wall with a GPU."""
    if not torch.cuda.is_initialized():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def synchronize() -> None:
    """Waits for a GPU, where one is used."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def reset_peak() -> int:
    """Sets the peak to what is in use now, which it returns, in bytes.

    On a GPU that is what the allocator gave out, else what is resident (Linux).
    """
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    _CLEAR.write_text("5")
    return _bytes("VmRSS")


def trim() -> None:
    """Gives the system what earlier work gave back: work that found it would seem to need none."""
    ctypes.CDLL(None).malloc_trim(0)


def peak() -> int:
    """Most bytes that were in use since :func:`reset_peak`."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    return _bytes("VmHWM")


def in_child(work: Callable[[], Result]) -> Result:
    """Runs something in a forked child, where memory of earlier work cannot hide what it takes.

    Args:
        work: returns what JSON can hold.
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
