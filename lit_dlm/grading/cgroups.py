"""Memory cgroups, of version 1 or 2: a limit on all that the processes of a sandbox hold."""

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
    """Returns where memory cgroups can be made (for most users nowhere); tried once."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            folder = _FOLDERS / "memory" / path[1:]
        elif not controllers:
            # In version 2, a group that has processes cannot contain groups with limits.
            folder = (_FOLDERS / path[1:]).parent
        else:
            continue
        with contextlib.suppress(OSError), _new(folder, 1 << 30):
            _remove_left(folder)
            return folder
    return None


@contextlib.contextmanager
def memory_cgroup(num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Yields a function that puts a process, by its id, into a new cgroup, if these can be made.

    Processes that it starts from then on are in there, too; all must have ended at the exit.
    """
    parent = parent_folder()
    if parent is None:
        yield lambda _pid: None
        return
    with _new(parent, num_bytes) as folder:

        def add(pid: int) -> None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and reports why itself
                (folder / "cgroup.procs").write_text(str(pid))

        yield add


@contextlib.contextmanager
def _new(parent: Path, num_bytes: int) -> Iterator[Path]:
    folder = parent / f"lit_dlm_{os.getpid()}_{next(_numbers)}"
    folder.mkdir()
    try:
        # The second name of each pair is that of swap, and exists only if the kernel counts swap.
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
    # A run that was killed has left its groups; one whose process lives may be at work in them.
    for folder in parent.glob("lit_dlm_*_*"):
        if not Path("/proc", folder.name.split("_")[2]).exists():
            _removed(folder)
