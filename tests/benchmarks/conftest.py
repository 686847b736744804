"""Scripts of benchmarks, imported or run."""

import runpy
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, fork


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def run_script(folder: Path, name: str, *flags: str) -> str:
    """Runs a script in a process of its own; what it prints."""
    process = fork(folder, _run, name, flags)
    process.join(300)
    assert process.exitcode == 0, (folder / "err").read_text()[-2000:]
    return (folder / "out").read_text()


def _run(name: str, flags: tuple[str, ...]) -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    sys.argv = [name, *flags]
    runpy.run_path(str(ROOT / "benchmarks" / name), run_name="__main__")
