"""Servers in processes of their own, for tests of all that speaks to them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.e2e.runs import start


@dataclass
class Running:
    """A server that listens."""

    url: str
    process: BaseProcess
    folder: Path

    @property
    def log(self) -> str:
        return (self.folder / "err").read_text()


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[Running]:
    """Starts ``lit-dlm serve`` on a free port and ends it, if nobody else has."""
    folder.mkdir(exist_ok=True)
    (folder / "out").touch()
    process = start(folder, "serve", *arguments, "--port", "0")
    try:
        told = until(lambda: (folder / "out").read_text(), lambda text: "next:" in text, process)
        (url,) = re.findall(r"answers at (\S+)/v1", told)
        yield Running(url, process, folder)
    finally:
        process.kill()
        process.join()


def until(
    look: Callable[[], Any], wanted: Callable[[Any], bool], process: BaseProcess | None = None
) -> Any:
    """Looks until it sees what is wanted, for two minutes at most."""
    end = time.monotonic() + 120
    while not wanted(seen := look()):
        assert time.monotonic() < end, seen
        assert process is None or process.is_alive(), seen
        time.sleep(0.02)
    return seen
