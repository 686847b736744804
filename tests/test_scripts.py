"""Benchmarks and experiments: scripts outside the packages, which a renamed import would break."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [
    path
    for folder in ("benchmarks", "experiments")
    for path in sorted((ROOT / folder).glob("*.py"))
    if "def main(" in path.read_text()
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_finds_what_it_imports(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(script.parent))
    assert callable(runpy.run_path(str(script), run_name="imported")["main"])
