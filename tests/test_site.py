"""The documentation builds without a warning, and its notebook runs."""

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow


def test_the_site_builds_without_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = pytest.importorskip("mkdocs.config", reason="MkDocs is not installed")
    from mkdocs.commands.build import build

    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    monkeypatch.chdir(ROOT)
    build(config.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))
    pages = {path.parent.name: path.read_text() for path in tmp_path.rglob("index.html")}
    assert "make quickstart" in pages["quickstart"]  # a section of the README
    assert "benchmark_tiny" in pages["recipes"]
    assert 'id="lit_dlm.rl.step.rl_step"' in pages["api"]
    assert "stack_dark.png#only-dark" in pages["stack"]
    assert not [name for name, page in pages.items() if "--8<--" in page or "@@" in page]


def test_the_notebook_runs(capsys: pytest.CaptureFixture[str]):
    cells = json.loads((ROOT / "examples" / "first_decode.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    printed = []
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "first_decode.ipynb", "exec"), names)
            printed.append(capsys.readouterr().out)
    _, decoded, steps, trained = printed
    assert decoded.count("#### 36") == 3
    assert steps.splitlines()[0].count("·") == 32
    assert "41-5=36" in steps
    assert trained == "before: '34+7=41\\n#### 41', after: '7+34=41'\n"
