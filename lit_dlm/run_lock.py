"""One process at a time in a run folder."""

from __future__ import annotations

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

from lit_dlm.trajectories.store.writer import lives, lock

logger = logging.getLogger(__name__)


@contextmanager
def locked(folder: Path, name: str) -> Iterator[Path]:
    """Holds a folder for this process; the lock ends with the process, however that ends.

    Yields the file that says so. Commands of other names may share the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".{name}.lock"
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        is_free = lock(file)
        owner = _owner(os.read(file, 4096))
        if is_free is False or (is_free is None and _lives(owner)):
            os.close(file)
            hint = "" if is_free is False else f", or delete {path} if that process is dead"
            raise ValueError(
                f"{folder}: is in use by {_spoken(owner)}; wait for its end or choose another "
                f"run_dir{hint}"
            )
        if os.fstat(file).st_nlink:
            break
        os.close(file)  # its owner has just ended and deleted it
    if owner is not None:
        logger.warning("%s: going on after %s, which is dead", folder, _spoken(owner))
    facts = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(facts).encode(), 0)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
        os.close(file)


def _owner(text: bytes) -> dict[str, Any] | None:
    """Who wrote a lock; nothing in it is known of a process that died while writing."""
    try:
        return dict(json.loads(text)) if text else None
    except (ValueError, TypeError):
        return {}


def _spoken(owner: dict[str, Any] | None) -> str:
    if not owner:
        return "another process"
    return f"process {owner['pid']} on {owner['host']} since {owner['since']} ({owner['command']})"


def _lives(owner: dict[str, Any] | None) -> bool:
    """Whether a process may still run, where the file system has no locks that would tell."""
    if not owner:
        return False
    return owner["host"] != socket.gethostname() or lives(owner["pid"])
