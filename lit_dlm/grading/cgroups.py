"""Memory cgroups, of version 1 or 2: a limit for all processes of a sandbox and what they hold."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_FOLDERS = Path("/sys/fs/cgroup")
_numbers = itertools.count()


@functools.cache
def parent_folder() -> Path | None:
    """Where memory cgroups can be made (for most users nowhere); tried once."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            folder = _FOLDERS / "memory" / path[1:]
        elif not controllers:
            # Of version 2, no group that has processes can have limited groups within.
            folder = (_FOLDERS / path[1:]).parent
        else:
            continue
        with contextlib.suppress(OSError), _new(folder, 1 << 30):
            _remove_left(folder)
            return folder
    return None


@contextlib.contextmanager
def memory_cgroup(num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Gives a function that puts a process, by its id, into a cgroup of its own, if there are any.

    What it starts from then on is in there, too; all of it must have been ended at the exit.
    """
    parent = parent_folder()
    if parent is None:
        yield lambda _pid: None
        return
    with _new(parent, num_bytes) as folder:

        def put(pid: int) -> None:
            with contextlib.suppress(ProcessLookupError):  # it tells itself why it has ended
                (folder / "cgroup.procs").write_text(str(pid))

        yield put


@contextlib.contextmanager
def _new(parent: Path, num_bytes: int) -> Iterator[Path]:
    folder = parent / f"lit_dlm_{os.getpid()}_{next(_numbers)}"
    folder.mkdir()
    try:
        # The second of each, swap, only where the kernel counts it.
        old = (folder / "memory.limit_in_bytes").exists()
        limit, swap = ("limit_in_bytes", "memsw.limit_in_bytes") if old else ("max", "swap.max")
        (folder / f"memory.{limit}").write_text(str(num_bytes))
        if (folder / f"memory.{swap}").exists():
            (folder / f"memory.{swap}").write_text(str(num_bytes if old else 0))
        yield folder
    finally:
        # Processes that were killed may take a moment to end.
        deadline = time.monotonic() + 5.0
        while not _removed(folder) and time.monotonic() < deadline:
            time.sleep(0.002)


def _removed(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        folder.rmdir()
    return not folder.exists()


def _remove_left(parent: Path) -> None:
    """Removes what killed runs have left."""
    for folder in parent.glob("lit_dlm_*_*"):
        if not Path("/proc", folder.name.split("_")[2]).exists():
            _removed(folder)
