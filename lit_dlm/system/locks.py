"""Locks that say "a living process works here", and how to tell where a file system has none."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def lock(fd: int) -> bool | None:
    """Takes the lock that says "a living process writes this file"; returns whether it did.

    Record locks end with their process and are not inherited by forked children, such as loader
    workers that outlive a killed parent by some seconds. ``None`` on a file system without locks.
    """
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True


def lives(pid: int) -> bool:
    """Whether this machine runs a process with this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # of another user
    return True


def state_file(saved: Path) -> Path:
    """The file beside a saved configuration that says whether its run has begun or is done."""
    return saved.with_name(f".{saved.stem}.state")


def in_use(path: Path) -> bool:
    """Whether a living process holds this file of :func:`locked`, by what it wrote there."""
    # Asking for the lock itself would refuse it, for a moment, to a run that begins.
    return path.exists() and _lives(_owner(path.read_bytes()))


@contextmanager
def locked(folder: Path, name: str) -> Iterator[Path]:
    """Locks a folder against commands of this name; yields the lock file, gone with the process."""
    path = folder / f".{name}.lock"
    while True:
        with _writable(folder):
            folder.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        # The lock decides. What is written in the file is read only where there are none, and for
        # messages: a killed process leaves its file behind.
        is_free = lock(file)
        owner = _owner(os.read(file, 4096))
        if is_free is False or (is_free is None and _lives(owner)):
            os.close(file)
            hint = "" if is_free is False else f", or delete {path} if that process is dead"
            raise ValueError(
                f"{folder}: is in use by {_spoken(owner)}; wait for its end or choose another "
                f"run_dir{hint}"
            )
        # A file that was opened before its owner deleted it is locked, but nobody else sees it.
        if os.fstat(file).st_nlink:
            break
        os.close(file)  # its owner has just ended and deleted it
    if owner is not None:
        logger.warning("%s: resuming after %s, which has died", folder, _spoken(owner))
    metadata = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }
    try:
        with _writable(folder):
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(metadata).encode(), 0)
        yield path
    finally:
        # Deleted while it is locked: a process that opens it now takes another turn above.
        path.unlink(missing_ok=True)
        os.close(file)


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"run_dir: {folder} cannot be written to ({reason})") from error


def _owner(text: bytes) -> dict[str, Any] | None:
    """Who wrote a lock; ``None`` for an empty file, ``{}`` if its process died while writing it."""
    try:
        return dict(json.loads(text)) if text else None
    except (ValueError, TypeError):
        return {}


def _spoken(owner: dict[str, Any] | None) -> str:
    if not owner:
        return "another process"
    return f"process {owner['pid']} on {owner['host']} since {owner['since']} ({owner['command']})"


def _lives(owner: dict[str, Any] | None) -> bool:
    """Whether the owner may still run, where the file system has no locks that would show it."""
    if not owner:
        return False
    return owner["host"] != socket.gethostname() or lives(owner["pid"])
