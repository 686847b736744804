"""A method is one room: what is left of the project works without it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lit_dlm.lockstep

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parents[1]
# Every module is imported, and an experiment of another method becomes a run's configuration.
WITHOUT_IT = """
import pkgutil, importlib, sys
import cli, lit_dlm

def broken(name):
    raise ImportError(name)

for one in pkgutil.walk_packages(lit_dlm.__path__, "lit_dlm.", broken):
    try:
        importlib.import_module(one.name)
    except ModuleNotFoundError as error:  # of an extra that is not installed
        assert not error.name.startswith("lit_dlm"), error
assert "lit_dlm.rl.module" in sys.modules and "lit_dlm.lockstep" not in sys.modules
cli.main(["fit", "--config=exp/tracerl_tiny", "--print_config"])
"""


@pytest.mark.slow
def test_without_the_room_and_its_configurations_all_else_imports_and_parses(tmp_path: Path):
    for name in ("lit_dlm", "callbacks", "datamodules", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True)
    shutil.copy(ROOT / "cli.py", tmp_path)
    shutil.rmtree(tmp_path / "lit_dlm" / "lockstep")
    words = ("lockstep", *(name for name in vars(lit_dlm.lockstep) if name[0].isupper()))
    its_own = [
        path
        for path in (tmp_path / "configs").rglob("*.yaml")
        if any(word in f"{path.relative_to(tmp_path)} {path.read_text()}" for word in words)
    ]
    assert len(its_own) > 4
    for path in its_own:
        path.unlink()
    naming = [
        str(path.relative_to(tmp_path))
        for path in tmp_path.rglob("*.py")
        if "lit_dlm.lockstep" in path.read_text()
    ]
    assert naming == ["lit_dlm/config/names.py"]  # the table of short names, as text
    named = re.compile("|".join(["lit_dlm.lockstep", *words[1:], *(path.stem for path in its_own)]))
    tests = (ROOT / "tests").rglob("*.py")
    assert {path.parent for path in tests if named.search(path.read_text())} == {TESTS}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_IT], cwd=tmp_path, env={**os.environ, "PYTHONPATH": "."},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "TraceRLModule" in done.stdout
