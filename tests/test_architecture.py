"""Facts about the tree itself: import costs, names, forbidden calls."""

import ast
import graphlib
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [
    path
    for folder in ("lit_dlm", "datamodules", "callbacks")
    for path in sorted((ROOT / folder).rglob("*.py"))
] + [ROOT / "cli.py"]


@pytest.mark.slow
def test_folders_of_the_user_named_like_ours_hide_nothing(tmp_path: Path):
    """The two packages at the top of the tree are imported by a name that nobody else has."""
    for name in ("callbacks", "datamodules"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("class Mine: ...\n")
    code = (
        "import sys; sys.path.insert(0, '')\n"
        "import callbacks, datamodules, lit_dlm.commands.trainer, lit_dlm.callbacks as ours\n"
        "print(callbacks.Mine, datamodules.Mine, ours.DecodeWriter)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "lit_dlm.callbacks.decode_writer.DecodeWriter" in done.stdout


def test_no_file_has_a_name_that_says_nothing_and_the_command_line_no_logic():
    empty = {"utils.py", "util.py", "common.py", "helpers.py", "misc.py"}
    assert not [path for path in SOURCES if path.name in empty]
    assert len((ROOT / "lit_dlm" / "cli.py").read_text().splitlines()) <= 130


def test_no_import_circles():
    graph = grimp.build_graph("lit_dlm", cache_dir=None)
    imported = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    graphlib.TopologicalSorter(imported).prepare()  # CycleError names the circle


def test_no_test_imports_another():
    graph = grimp.build_graph("tests", cache_dir=None)
    tests = {name for name in graph.modules if name.rpartition(".")[2].startswith("test_")}
    assert len(tests) > 100
    assert not {name for name in tests if graph.find_modules_that_directly_import(name)}


# The sandbox's child must catch whatever the code it runs may raise.
FREE = {"hides faults": "child", "families of models belong to the backbones": "backbones"}
PERMITTED = {
    # Reads the plan of a sharded checkpoint with a list of all that it may name, before torch does.
    "pickles run code when loaded": {"lit_dlm/training/checkpoint.py"},
    # A thread hands whatever happened to its caller; a callback must join that thread. What the
    # parsers of libraries raise becomes an error that names their file and has it as its cause.
    "hides faults": {
        "lit_dlm/system/files.py",
        "callbacks/decode_writer.py",
        "callbacks/record_shards.py",
        "lit_dlm/trajectories/store/background.py",
        "lit_dlm/commands/trainer.py",  # tells some in one line and raises all others
    },
}


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r"^\s*(import|from) pickle\b|allow_pickle\s*=\s*True", "pickles run code when loaded"),
        (r"trust_remote_code\s*=\s*True", "remote code"),
        (r"weights_only\s*=\s*False", "pickled checkpoints"),
        (r"shell\s*=\s*True", "shell commands"),
        (r"^\s*(from|import) (callbacks|datamodules)", "hidden by a folder of the user's"),
        (r"^\s*except (Exception|BaseException)?\s*[:a]", "hides faults"),
        (r"\bTODO\b|\bFIXME\b", "unfinished"),
        (
            r"family\s*(==|in|!=)|==\s*[\"'](dream|llada|sdar|mmada|trado)[\"']",
            "families of models belong to the backbones",
        ),
    ],
)
def test_forbidden_code_does_not_occur(pattern: str, why: str):
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in SOURCES
        if str(path.relative_to(ROOT)) not in PERMITTED.get(why, ())
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if re.search(pattern, line) and FREE.get(why) not in path.parts
    ]
    assert not found, why


def test_every_package_that_is_imported_is_declared():
    """Those that come along with others may stay away one day."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    declared = {re.split(r"[\[<>=!~; ]", one)[0].lower().replace("_", "-") for one in wanted}
    # Where scikit-learn is absent, only its name in the registry is known.
    distributions = {"sklearn": ["scikit-learn"]} | packages_distributions()
    imported = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add((node.module or "").partition(".")[0])
    third_party = imported - set(sys.stdlib_module_names) - {"lit_dlm", "cli"}
    assert {"torch", "numpy", "yaml"} <= third_party
    undeclared = {
        name
        for name in third_party
        if not declared & {one.lower().replace("_", "-") for one in distributions.get(name, [name])}
    }
    assert not undeclared
