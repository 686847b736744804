"""What the scripts share: options, times taken in turns, peak memory, and printing of figures."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from lit_dlm.backbones.architecture import Architecture
from lit_dlm.backbones.resolution import resolve

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")

Result = TypeVar("Result")


def options(
    doc: str | None, arguments: Sequence[str] | None = None, **defaults: Any
) -> argparse.Namespace:
    """Reads the options of a script, and sets torch's number of threads.

    Args:
        doc: what ``--help`` prints.
        arguments: words of the command line; those of this process by default.
        defaults: default of each option, alone or with a text for ``--help``. An integer must be
            positive if its default is; a list takes one or more values. ``--threads`` and
            ``--json`` are added.
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
    """Returns the median seconds of each run; every repetition runs all of them in turn."""
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
    """Returns the median time by :func:`clock`, after one run to warm up."""
    work()
    return in_turns({"work": work}, repeats, clock)["work"]


def clock() -> float:
    """Returns CPU seconds of this process, which other work disturbs less; wall time with a GPU."""
    if not torch.cuda.is_initialized():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def synchronize() -> None:
    """Waits for a GPU, where one is used."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def reset_peak() -> int:
    """Resets the peak to the memory in use now, and returns that in bytes.

    On a GPU this is what the allocator has handed out, otherwise the resident set (Linux).
    """
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    _CLEAR.write_text("5")
    return _bytes("VmRSS")


def trim() -> None:
    """Returns freed memory to the system: work that reused it would seem to need none."""
    ctypes.CDLL(None).malloc_trim(0)


def peak() -> int:
    """Returns the most bytes in use since :func:`reset_peak`."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    return _bytes("VmHWM")


def in_child(work: Callable[[], Result]) -> Result:
    """Runs ``work`` in a forked child, where memory of earlier work cannot hide what it needs.

    The result has to be a value that JSON can hold.
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


def released_architecture(release: str) -> Architecture:
    """Returns the architecture of a key of :data:`~tests.twins.RELEASES`."""
    sys.path.insert(0, str(Path(__file__).parents[1]))  # where the tests are
    from tests.twins import RELEASES

    known = RELEASES[release]
    return resolve(known.config, added_tokens=known.vocabulary.ids()).architecture


def _bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"{_STATUS} has no {field}: memory can be measured on Linux only")
