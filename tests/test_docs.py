"""What the documents say of the code is so."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path
from pydoc import locate

import pytest
import torch

import lit_dlm
from lit_dlm.decoding import Decoder, NoQuota

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURE = (ROOT / "docs" / "concepts" / "architecture.md").read_text()
GLOSSARY = (ROOT / "docs" / "concepts" / "glossary.md").read_text()
PAGES = [
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("*.md")),
    ROOT / "experiments/README.md",
]


def python_of(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@cache
def defined(path: str) -> frozenset[str]:
    """Classes, functions and methods of a file, methods as ``Class.method``."""
    kinds = (ast.ClassDef, ast.FunctionDef)
    names = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, kinds):
            names.add(node.name)
            inner = node.body if isinstance(node, ast.ClassDef) else []
            names |= {f"{node.name}.{one.name}" for one in inner if isinstance(one, kinds)}
    return frozenset(names)


def test_architecture_names_functions_that_are_where_it_says():
    """A name in backticks right behind a file, or behind another such name, is in that file."""
    cells = re.findall(r"`(\w+/[\w/]+\.py)`((?:,? `[A-Za-z_.]+`)+)", ARCHITECTURE)
    named = [(path, name) for path, names in cells for name in re.findall(r"`(.+?)`", names)]
    assert len(named) > 60
    assert not [(path, name) for path, name in named if name not in defined(path)]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_linked_and_named_files_exist(page: Path):
    text = page.read_text()
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    folders = "lit_dlm|datamodules|callbacks|configs|examples|experiments|benchmarks|docs|tests"
    named = re.findall(rf"`((?:{folders})/[\w./-]*)`", text)
    assert not [name for name in links if not (page.parent / name).exists()]
    assert not [name for name in named if not (ROOT / name).exists()]


def test_python_of_pages_imports_what_exists():
    """Also of those blocks that no test runs."""
    blocks = [code for page in PAGES for code in python_of(page.read_text())]
    names = {
        f"{node.module}.{one.name}" if isinstance(node, ast.ImportFrom) else one.name
        for block in blocks
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for one in node.names
    }
    assert len(names) > 20
    assert not [name for name in sorted(names) if locate(name) is None]


def test_the_readme_runs_something_soon_and_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert [line.startswith("$ lit-dlm") for line in lines].index(True) < 12
    assert len(lines) <= 130


def test_every_page_is_once_in_the_navigation():
    named = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2])
    docs = ROOT / "docs"
    assert sorted(named) == sorted(str(path.relative_to(docs)) for path in docs.rglob("*.md"))


def test_pages_begin_with_a_paragraph():
    """What a page has to say comes before its parts; the start page has that of the README."""
    pages = [page for page in ROOT.glob("docs/**/*.md") if page.parent.name != "docs"]
    starts = {page: re.findall(r"^# .+\n\n(.*)", page.read_text()) for page in pages}
    assert not [page for page, found in starts.items() if not re.match(r"[\w*`\[]", found[0])]


def test_every_picture_has_a_dark_version_and_a_page():
    text = "".join(page.read_text() for page in PAGES)
    assert not re.findall(r"!\[[^\]]*\]\(.*", text)
    pairs = re.findall(r'srcset="([^"]+)"><img\s+src="([^"]+)"', text)
    assert not [(dark, light) for dark, light in pairs if not re.search(r"_dark\.\w+$", dark)]
    kept = {path.name for path in ROOT.glob("docs/**/*") if path.suffix in (".png", ".gif")}
    assert {Path(name).name for pair in pairs for name in pair} == kept


def test_the_picture_is_the_order_that_the_linter_enforces():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(one["layers"] for one in contracts["contracts"] if one["type"] == "layers")
    picture = re.findall(r"```text\n(.*?)```", ARCHITECTURE, re.DOTALL)[0]
    rows = re.findall(r"^([\w.]+(?: \| [\w.]+)*)(?:  |$)", picture, re.MULTILINE)
    assert rows == ["cli.py", *layers]


def test_the_classes_shown_in_the_architecture_work():
    """Of three masked cells the policy takes the first and the third."""
    found: dict[str, type] = {}
    for code in python_of(ARCHITECTURE):
        exec(compile(code, "architecture.md", "exec"), found)
    decoder = Decoder(policy=found["EveryOther"](), quota=NoQuota())
    done = lit_dlm.generate("tiny", ["Hi"], decode=decoder, response_length=32)
    assert done.num_steps == [6]  # 32, 16, 8, 4, 2, 1 masks
    advantages = found["BestOnly"]().compute(torch.tensor([1.0, 0.0, 1.0]))
    assert advantages.tolist() == [1.0, 0.0, 1.0]


def test_identifiers_of_the_glossary_are_those_of_the_code():
    """A name in the first column, or in the second one with a capital, occurs in the packages."""
    rows = [line.split(" | ") for line in GLOSSARY.splitlines() if line.startswith("| ")]
    ours = [name for row in rows for name in re.findall(r"`(\w+)`", row[0])]
    ours += [name for row in rows for name in re.findall(r"`([A-Z]\w+)`", row[1])]
    assert len(ours) > 10
    folders = ("lit_dlm", "datamodules", "callbacks")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    words = set(re.findall(r"\w+", "".join(path.read_text() for path in files)))
    assert not [name for name in ours if name not in words]
