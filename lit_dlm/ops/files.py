"""Files that readers see as a whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives another file to fill, which takes the place of ``path`` when that has succeeded."""
    partial = path.with_name(f"{path.name}.tmp-{os.getpid()}")  # processes share folders
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        partial.unlink(missing_ok=True)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file so that readers see all of it or nothing, and a crash of the machine keeps it.

    Texts are UTF-8; the folder is made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial, partial.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames inside a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
